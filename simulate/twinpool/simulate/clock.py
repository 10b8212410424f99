"""Virtual time: what happens next. Always true: time never goes back, and equal times keep the order of planning."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """A queue of callbacks by time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._number = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, moment: float, do: Callable[[], None]) -> None:
        """Do something at ``moment``, or now when that has passed."""
        self._number += 1
        heapq.heappush(self._queue, (max(moment, self.now), self._number, do))

    def run(self, until: float = float("inf")) -> None:
        """Let everything happen that is planned up to ``until``."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, do = heapq.heappop(self._queue)
            do()
