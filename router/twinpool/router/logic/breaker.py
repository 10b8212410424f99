"""Endpoints that just failed or just came: for how long others are preferred, and how they get their share back.

Nothing here is final: what is avoided is still used when nothing else is left, and being taken out for good is
Kubernetes' and the health probe's business. After a failure an endpoint is avoided for a time that doubles while it
fails; then one request at a time tries it. After a success its share grows again, and so does that of a newcomer beside
others: a cold engine that gets its full share at once fails again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable
    from random import Random

FIRST_SECONDS: Final = 0.5
LONGEST_SECONDS: Final = 10.0
#: A trial that has not ended after this many seconds no longer keeps others from trying.
TRIAL_SECONDS: Final = 5.0
#: How long a newcomer's share grows; after a failure it grows for :data:`RECOVERY` times the time of being avoided.
SLOW_START_SECONDS: Final = 10.0
RECOVERY: Final = 4
#: The share with which a slow start begins.
FIRST_SHARE: Final = 0.1


@dataclass(slots=True)
class _Suspect:
    #: Until when it is avoided altogether, or until when a trial keeps others away.
    until: float
    #: How long it was avoided the last time.
    seconds: float


class Breaker:
    """Opinions by endpoint id, fed by both legs; times in seconds on the caller's clock.

    An endpoint has one role, so these are opinions by endpoint and role.
    """

    def __init__(self) -> None:
        self._suspects: dict[str, _Suspect] = {}
        #: Since when the share of an endpoint grows, and for how many seconds.
        self._growing: dict[str, tuple[float, float]] = {}
        self._admitted: frozenset[str] = frozenset()
        #: Whether there is no opinion of anyone, as nearly always: nothing else need be asked or told then.
        self.quiet = True

    def failed(self, endpoint: str, now: float) -> None:
        """Avoid ``endpoint``, twice as long as the last time in a row."""
        suspect = self._suspects.setdefault(endpoint, _Suspect(now, FIRST_SECONDS / 2))
        suspect.seconds = min(2 * suspect.seconds, LONGEST_SECONDS)
        suspect.until = now + suspect.seconds
        self._growing.pop(endpoint, None)
        self.quiet = False

    def succeeded(self, endpoint: str, now: float) -> None:
        """Trust ``endpoint`` again, with a share that grows."""
        if self._suspects and (suspect := self._suspects.pop(endpoint, None)) is not None:
            self._growing[endpoint] = (now, min(RECOVERY * suspect.seconds, SLOW_START_SECONDS))

    def chosen(self, endpoint: str, now: float) -> None:
        """A request goes to ``endpoint``: if it is suspect, this is its trial, and others wait for what comes of it."""
        if self._suspects and (suspect := self._suspects.get(endpoint)) is not None and suspect.until <= now:
            suspect.until = now + TRIAL_SECONDS

    def avoided(self, now: float, rng: Random) -> Collection[str]:
        """Return the ids that this request should not go to if another one is left."""
        if not self._suspects and not self._growing:
            return ()
        avoided = self.suspects(now)
        for endpoint, (since, seconds) in list(self._growing.items()):
            share = _share(since, seconds, now)
            if share >= 1:
                del self._growing[endpoint]
            elif rng.random() >= share:
                avoided.add(endpoint)
        self.quiet = not self._suspects and not self._growing
        return avoided

    def suspects(self, now: float) -> set[str]:
        """Return the ids that are avoided altogether."""
        return {endpoint for endpoint, suspect in self._suspects.items() if suspect.until > now}

    def state(self, now: float) -> dict[str, dict[str, float]]:
        """Return for each endpoint with an opinion for how many seconds it is avoided yet, or what its share is."""
        found = {name: {"avoidedSeconds": round(max(0.0, one.until - now), 3)} for name, one in self._suspects.items()}
        for name, (since, seconds) in self._growing.items():
            found[name] = {"share": round(min(1.0, _share(since, seconds, now)), 3)}
        return found

    def keep(self, known: Container[str], admitted: Iterable[str], now: float) -> None:
        """Forget endpoints that no longer exist; those admitted now beside others start slowly."""
        admitted = frozenset(admitted)
        if self._admitted:
            self._growing.update((new, (now, SLOW_START_SECONDS)) for new in admitted - self._admitted)
        self._admitted = admitted
        for book in (self._suspects, self._growing):
            for gone in [endpoint for endpoint in book if endpoint not in known]:
                del book[gone]
        self.quiet = not self._suspects and not self._growing


def _share(since: float, seconds: float, now: float) -> float:
    return FIRST_SHARE + (1 - FIRST_SHARE) * (now - since) / seconds
