"""The work queue: which pools must be looked at, each at most once at a time.

The semantics are client-go's. A key that is added while it is being worked on is worked on once more afterwards; a
key that waits is not added twice; a failed key comes back after a delay that doubles up to a cap. All methods but
:meth:`WorkQueue.get` return at once and must be called from the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

#: First and longest delay of a failed key, in seconds.
FIRST_DELAY = 0.5
LONGEST_DELAY = 60.0


class WorkQueue(Generic[Key]):
    """Keys to work on, in the order in which they became due."""

    def __init__(self, first_delay: float = FIRST_DELAY, longest_delay: float = LONGEST_DELAY) -> None:
        self._first_delay = first_delay
        self._longest_delay = longest_delay
        self._ready: deque[Key] = deque()
        self._since: dict[Key, float] = {}
        self._dirty: set[Key] = set()
        self._working: set[Key] = set()
        self._later: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        """Return how many keys wait to be worked on now."""
        return len(self._ready)

    def age(self) -> float:
        """Return for how many seconds the key that is due first has waited, 0 when none waits."""
        return asyncio.get_running_loop().time() - self._since[self._ready[0]] if self._ready else 0.0

    def add(self, key: Key) -> None:
        """Ask for work on ``key`` as soon as possible."""
        self._forget_later(key)
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._working:
            self._offer(key)

    def add_after(self, key: Key, delay: float) -> None:
        """Ask for work on ``key`` in ``delay`` seconds, or earlier if that was asked for already."""
        loop = asyncio.get_running_loop()
        known = self._later.get(key)
        if key in self._dirty or (known is not None and known.when() <= loop.time() + delay):
            return
        self._forget_later(key)
        self._later[key] = loop.call_later(delay, self.add, key)

    def failed(self, key: Key, at_least: float = 0.0) -> float:
        """Ask for work on a key that failed after its back-off, or ``at_least`` that long; return the delay."""
        count = self._failures.get(key, 0)
        self._failures[key] = count + 1
        delay = max(at_least, min(self._first_delay * 2.0 ** min(count, 30), self._longest_delay))
        self.add_after(key, delay)
        return delay

    def succeeded(self, key: Key) -> None:
        """Forget a key's failures."""
        self._failures.pop(key, None)

    async def get(self) -> Key:
        """Wait for a key to work on; :meth:`done` must follow."""
        while not self._ready:
            self._wake.clear()
            await self._wake.wait()
        key = self._ready.popleft()
        self._since.pop(key, None)
        self._dirty.discard(key)
        self._working.add(key)
        return key

    def done(self, key: Key) -> None:
        """Say that the work on ``key`` has ended."""
        self._working.discard(key)
        if key in self._dirty:
            self._offer(key)

    def forget(self, key: Key) -> None:
        """Drop what is remembered about a key whose object is gone."""
        self._forget_later(key)
        self._failures.pop(key, None)

    def _offer(self, key: Key) -> None:
        self._ready.append(key)
        self._since[key] = asyncio.get_running_loop().time()
        self._wake.set()

    def _forget_later(self, key: Key) -> None:
        handle = self._later.pop(key, None)
        if handle is not None:
            handle.cancel()
