"""What the access log says of one request, and which requests it says something of.

No prompt, no answer, no key: names, counts and times only.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from random import Random

#: Failures of the servers (status 5xx) are logged whatever the sampling, up to so many in a second.
FAILURES_PER_SECOND: Final = 10


@dataclass(frozen=True, slots=True)
class Entry:
    """One request that has ended. Times are in seconds, ``time`` since the epoch; None: it did not get that far."""

    time: float
    request_id: str
    route: str
    #: 499: the client left.
    status: int
    key: str
    stream: bool
    #: Estimated from the body's size.
    prompt_tokens: int
    events: int
    queued: float | None
    first_byte: float | None
    total: float
    #: remote, local, failed, or whole for a request that cannot be split; with the reason where there is one.
    handoff: str
    reason: str
    prefill: str
    decode: str
    prefill_legs: int
    decode_legs: int


def line(entry: Entry) -> bytes:
    """Return one line of JSON; what is empty is left out."""
    values = {name: getattr(entry, name) for name in Entry.__slots__}
    shown = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in values.items()
        if value not in (None, "") and value is not False
    }
    return json.dumps(shown, separators=(",", ":")).encode() + b"\n"


class Sampler:
    """Chooses the requests that are logged: a share of all, and failures within their bound."""

    def __init__(self, share: float, rng: Random) -> None:
        self._share = share
        self._rng = rng
        self._failures = 0

    def wanted(self, status: int) -> bool:
        """Whether a request that ended with ``status`` is logged."""
        if self._share and self._rng.random() < self._share:
            return True
        if status < 500 or self._failures >= FAILURES_PER_SECOND:
            return False
        self._failures += 1
        return True

    def second(self) -> None:
        """A second has passed."""
        self._failures = 0
