"""Endpoints that just failed, and for how long others are preferred.

Suspicion is short and never final: a suspect is still used when nothing else is left, and one success clears it. Being
taken out for good is Kubernetes' and the health probe's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Container

FIRST_SECONDS: Final = 0.5
LONGEST_SECONDS: Final = 10.0


class Breaker:
    """Suspicion by endpoint id; times in seconds on the caller's clock. Both legs of a handoff feed it."""

    def __init__(self) -> None:
        self._suspects: dict[str, tuple[float, float]] = {}

    def failed(self, endpoint: str, now: float) -> None:
        """Suspect ``endpoint``, twice as long as the last time in a row."""
        _, last = self._suspects.get(endpoint, (0.0, FIRST_SECONDS / 2))
        seconds = min(2 * last, LONGEST_SECONDS)
        self._suspects[endpoint] = (now + seconds, seconds)

    def succeeded(self, endpoint: str) -> None:
        """Clear ``endpoint``."""
        if self._suspects:
            self._suspects.pop(endpoint, None)

    def suspects(self, now: float) -> Collection[str]:
        """Return the ids that are suspect now."""
        if not self._suspects:
            return ()
        return {endpoint for endpoint, (until, _) in self._suspects.items() if until > now}

    def keep(self, known: Container[str]) -> None:
        """Forget endpoints that no longer exist."""
        self._suspects = {endpoint: value for endpoint, value in self._suspects.items() if endpoint in known}
