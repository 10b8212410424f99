"""How late an event loop is: the one figure that tells a process that waits from one that is too busy to."""

from __future__ import annotations

from collections import deque
from typing import Final

#: Looks that are remembered.
KEPT: Final = 60


class Lag:
    """How much later than planned a process woke up, in seconds."""

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=KEPT)

    def woke(self, planned: float, now: float) -> None:
        """The process planned to wake up at ``planned``, and did ``now``."""
        self._late.append(max(0.0, now - planned))

    def state(self) -> dict[str, float]:
        """Return the last and the worst of the last :data:`KEPT` looks, in milliseconds."""
        last = self._late[-1] if self._late else 0.0
        return {"lastMs": round(last * 1000, 3), "worstMs": round(max(self._late, default=0.0) * 1000, 3)}
