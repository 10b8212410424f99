"""The queue of one simulated router, as routers of a pool with an objective hold back what workers would queue.

The places, the queue and its order are the router's own (``router/logic/places.py``, ``queue.py``). Always true: a
request is admitted once, and gives its place back once, however it ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.router.logic.places import CROWDED, Places
from twinpool.router.logic.queue import Queue, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.simulate.clock import Clock
    from twinpool.simulate.engines import Job


@dataclass(frozen=True, slots=True)
class Limits:
    """A pool's ``routing.queue``: requests at one decode worker, requests that may wait, and seconds for which."""

    concurrency: int = 8192
    most: int = 1024
    timeout: float = 30.0


class Admission:
    """See the module. ``begin`` sends a request on its way."""

    def __init__(self, clock: Clock, limits: Limits, ttft: float, begin: Callable[[Job], None]) -> None:
        self._clock = clock
        self._timeout = limits.timeout
        self._begin = begin
        self._queue: Queue[Job] = Queue(limits.most, ttft, objective=True)
        self._places = Places(0)
        #: Requests that have a place.
        self._running: set[int] = set()
        #: Seconds of prefill at prefill groups, by request.
        self._computing: dict[int, float] = {}
        self._scheduled = False

    @property
    def waiting(self) -> int:
        """Return how many wait."""
        return len(self._queue)

    @property
    def crowded(self) -> bool:
        """Return whether hardly a place is left."""
        return len(self._running) > CROWDED * self._places.requests

    def resize(self, places: Places) -> None:
        """Set what may be at the workers."""
        self._places = places
        self._pump_later()

    def enter(self, job: Job) -> None:
        """Send a request on its way, or let it wait, or turn one away: it is never answered then."""
        if self._free() and not len(self._queue):
            self._send(job)
            return
        now = self._clock.now
        entry = Waiting(job, "", 0, job.request.prompt + job.request.output, now)
        if self._queue.push(entry, now) is not entry:
            self._clock.at(now + self._timeout, lambda: self._queue.remove(entry))

    def sent(self, job: Job, seconds: float) -> None:
        """A prompt of so many seconds is at a prefill group."""
        self._computing[id(job)] = seconds

    def computed(self, job: Job) -> None:
        """That prompt is there no more; the second time is nothing."""
        if self._computing.pop(id(job), None) is not None:
            self._pump_later()

    def leave(self, job: Job) -> None:
        """A request that had a place has ended."""
        self._running.discard(id(job))
        self._pump_later()

    def keep(self, job: Job) -> None:
        """A request that lost its worker begins anew, and has its place still."""
        self._computing.pop(id(job), None)
        self._running.add(id(job))

    def _free(self) -> bool:
        if len(self._running) >= self._places.requests:
            return False
        most = self._places.crowded if self.crowded else self._places.prefill
        return most == math.inf or sum(self._computing.values()) < most

    def _send(self, job: Job) -> None:
        self._running.add(id(job))
        self._begin(job)

    def _pump_later(self) -> None:
        """By the clock, because a request that ends at once would begin the next one from its own end."""
        if not self._scheduled and self._queue:
            self._scheduled = True
            self._clock.at(self._clock.now, self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        while self._free():
            entry = self._queue.pop(self._clock.now)
            if entry is None:
                return
            self._send(entry.item)
