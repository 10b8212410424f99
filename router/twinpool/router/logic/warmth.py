"""What each worker's KV cache has been good for lately: prompt tokens that its engine did not compute again.

What a cache holds says little of its worth: most of it is never asked for. What it has answered fades with a half-life,
so a group that served its prefixes an hour ago is as cold as a new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

#: Seconds in which what was served counts half: sessions and shared prompts come back within minutes or not at all.
HALF_LIFE = 600.0


class Warmth:
    """Cached prompt tokens by worker, as engines report them, fading with :data:`HALF_LIFE`."""

    def __init__(self) -> None:
        self._served: dict[str, tuple[float, float]] = {}

    def add(self, worker: str, tokens: int, now: float) -> None:
        """An engine answered a prompt of which ``tokens`` were cached; ``now`` is in seconds and never goes back."""
        if tokens > 0:
            self._served[worker] = (self._faded(worker, now) + tokens, now)

    def keep(self, workers: Container[str]) -> None:
        """Forget workers that are gone."""
        self._served = {worker: served for worker, served in self._served.items() if worker in workers}

    def tokens(self, now: float) -> dict[str, int]:
        """Return what every worker's cache is worth now, in prompt tokens; those that are not named have nothing."""
        return {worker: round(self._faded(worker, now)) for worker in self._served}

    def _faded(self, worker: str, now: float) -> float:
        tokens, since = self._served.get(worker, (0.0, now))
        return float(tokens * 0.5 ** ((now - since) / HALF_LIFE))
