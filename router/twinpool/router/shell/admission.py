"""How many requests of this process are at the workers, and who waits until one of them ends.

Always true: an exchange is admitted once and gives its place back once, however it ends.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from twinpool.router.logic.errors import Refusal
from twinpool.router.logic.places import CROWDED
from twinpool.router.logic.queue import Queue, Waiting, retry_after

if TYPE_CHECKING:
    import asyncio

    from twinpool.router.logic.metrics import Numbers


class Guest(Protocol):
    """Who asks for a place."""

    def begin(self) -> None:
        """There is a place."""

    def turn_away(self, refusal: Refusal) -> None:
        """There will be none."""


class Admission:
    """Places for requests at the workers of one data process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        numbers: Numbers,
        *,
        size: int,
        timeout: float,
        patience: float,
        hold: float = 0.0,
        objective: bool = False,
    ) -> None:
        self._loop = loop
        self._numbers = numbers
        self._timeout = timeout
        #: How long requests wait while no worker serves; 0: not at all.
        self._hold = hold
        #: When a worker came to serve after a time without any.
        self._served = 0.0
        self._queue: Queue[Guest] = Queue(size, patience, objective=objective)
        self._running = 0
        #: Seconds of prefill at prefill workers, and how many there may be before others wait.
        self._prefill = 0.0
        self._most_prefill = self._most_crowded = math.inf
        #: None while no worker serves: nobody waits then, everybody is told, unless requests are held.
        self._places: int | None = None
        self._ended = 0
        self._rate = 0.0
        self._scheduled = False
        #: Where those are counted who need not wait: nearly all, in the first bucket.
        self._at_once = numbers.histogram("twinpool_router_queue_seconds").buckets

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def holding(self) -> bool:
        """Whether requests wait for a worker to come, not for room at one."""
        return self._places is None and self._hold > 0

    @property
    def running(self) -> int:
        """Requests that have a place."""
        return self._running

    @property
    def crowded(self) -> bool:
        """Whether hardly a place is left."""
        return self._places is not None and self._running > CROWDED * self._places

    @property
    def bounds_prefill(self) -> bool:
        """Whether requests wait for prefill that is at the workers."""
        return self._most_prefill < math.inf

    def resize(self, places: int, prefill: float = math.inf, crowded: float = math.inf) -> None:
        """Set the number of places, 0 when no worker serves.

        ``prefill`` and ``crowded`` are seconds of prefill from which on others wait: see :class:`Places`.
        """
        self._most_prefill, self._most_crowded = prefill, crowded
        if places and self._places is None:
            self._served = self._loop.time()
        self._places = places or None
        self._pump_later()

    def enter(self, guest: Guest, key: str, priority: int, tokens: int) -> Waiting[Guest] | None:
        """Let ``guest`` begin at once, or wait, or turn somebody away; return its entry while it waits."""
        if self._free and not len(self._queue):
            self._at_once[0] += 1
            self._begin(guest)
            return None
        entry = Waiting(guest, key, priority, tokens, self._loop.time())
        out = self._queue.push(entry, self._loop.time())
        if out is not None:
            self._turn_away(out, "full")
        return None if out is entry else entry

    def leave(self) -> None:
        """A guest that had a place is done."""
        self._running -= 1
        self._ended += 1
        if self._queue:
            self._pump_later()

    def sent(self, seconds: float) -> None:
        """A prompt of so many seconds is at a prefill worker."""
        self._prefill += seconds

    def computed(self, seconds: float) -> None:
        """That prompt is there no more."""
        self._prefill = max(0.0, self._prefill - seconds)
        if self._queue:
            self._pump_later()

    def forget(self, entry: Waiting[Guest]) -> None:
        """The client of somebody who waits has left."""
        self._queue.remove(entry)

    def sweep(self) -> None:
        """Once a second: turn away who waited too long, and see how many requests end in a second."""
        self._rate += (self._ended - self._rate) / 4
        self._ended = 0
        longest, reason = (self._hold, "unserved") if self.holding else (self._timeout, "timeout")
        if self._hold and not self.holding and self._loop.time() - self._served < longest:
            return  # those who were held have a time-out's length to find room
        for entry in self._queue.expired(self._loop.time() - longest):
            self._turn_away(entry, reason)

    @property
    def _free(self) -> bool:
        """Whether one more may begin; while no worker serves, to be told so."""
        if self._places is None:
            return not self._hold
        return self._running < self._places and self._prefill < (
            self._most_crowded if self.crowded else self._most_prefill
        )

    def _begin(self, guest: Guest) -> None:
        self._running += 1
        guest.begin()

    def _pump_later(self) -> None:
        """From the loop, because an exchange that fails at once would begin the next one from its own end."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._scheduled = False
        while self._free:
            entry = self._queue.pop(self._loop.time())
            if entry is None:
                return
            self._numbers.observe("twinpool_router_queue_seconds", self._loop.time() - entry.since)
            self._begin(entry.item)

    def _turn_away(self, entry: Waiting[Guest], reason: str) -> None:
        self._numbers.add("twinpool_router_turned_away_total", (reason,))
        seconds = retry_after(len(self._queue), self._rate)
        if reason == "full":
            message = "More requests wait than the pool's routing.queue.max allows. Try again later."
            refusal = Refusal(429, "queue_full", message, retry_after=seconds)
        elif reason == "unserved":
            message = f"No worker came within {self._hold:g} s (the pool's routing.queue.hold). Try again later."
            refusal = Refusal(503, "no_worker", message, retry_after=seconds)
        else:
            message = f"No worker had room within {self._timeout:g} s (the pool's routing.queue.timeout)."
            refusal = Refusal(504, "queue_timeout", message, retry_after=seconds)
        entry.item.turn_away(refusal)
