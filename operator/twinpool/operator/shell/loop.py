"""The loop: take a pool from the queue, observe, plan, execute. Nothing here decides what should be."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.status import unreadable
from twinpool.operator.shell.apply import Executor, NotLeader
from twinpool.operator.shell.cluster import ApiRefused
from twinpool.operator.shell.observe import Memory, observe, read_pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.operator.logic.settings import Settings
    from twinpool.operator.shell.lease import Leadership
    from twinpool.operator.shell.metrics import Metrics
    from twinpool.operator.shell.queue import WorkQueue
    from twinpool.operator.shell.watch import Cache, PoolKey

_log = logging.getLogger(__name__)

#: Seconds after which a pool is looked at even if nothing happened.
RESYNC = 300.0
#: Seconds until a group that got its labels back is certainly in the cache again.
RESTORE_DELAY = 1.0
#: Seconds until a pool is looked at again whose plan ended because the Lease could not be renewed in time.
LEASE_DELAY = 1.0


class Reconciler:
    """Brings pools to what their specs say, one at a time each."""

    def __init__(
        self,
        cache: Cache,
        queue: WorkQueue[PoolKey],
        leadership: Leadership,
        executor: Executor,
        memory: Memory,
        settings: Settings,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._leadership = leadership
        self._executor = executor
        self._memory = memory
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        #: When each reconciliation that is running began, by the loop's clock.
        self.running: dict[PoolKey, float] = {}
        #: Groups that a watch reported as gone since the pool was last looked at.
        self.gone: dict[PoolKey, set[str]] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def work(self) -> None:
        """Reconcile pools until cancelled or drained; only while the Lease is held."""
        while not self._draining:
            await self._leadership.held.wait()
            key = await self._queue.get()
            self._metrics.queue_depth.set(len(self._queue))
            if not self._draining:
                await self._track(key)
            self._queue.done(key)

    async def drain(self, patience: float) -> None:
        """Begin nothing new and wait, at most ``patience`` seconds, for what is running."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), patience)

    async def _track(self, key: PoolKey) -> None:
        self.running[key] = asyncio.get_running_loop().time()
        self._idle.clear()
        try:
            await self._guarded(key)
        finally:
            del self.running[key]
            if not self.running:
                self._idle.set()

    async def _guarded(self, key: PoolKey) -> None:
        with self._metrics.reconcile_seconds.time():
            try:
                again = await self._reconcile(key)
            except NotLeader:
                self._metrics.reconciles.labels("not_leader").inc()
                self._queue.add_after(key, LEASE_DELAY)
            except ApiRefused as error:
                self._metrics.reconciles.labels("api_error").inc()
                _log.warning("%s/%s: %s; trying again in %.1f s", *key, error, self._queue.failed(key))
            except Exception:
                self._metrics.reconciles.labels("bug").inc()
                _log.exception("%s/%s: reconciling failed; trying again in %.1f s", *key, self._queue.failed(key))
            else:
                self._metrics.reconciles.labels("done").inc()
                if again is not None:
                    self._queue.add_after(key, again)

    async def _reconcile(self, key: PoolKey) -> float | None:
        """Bring one pool closer to its spec; return the seconds after which to look again, None for never."""
        body = self._cache.pool(key)
        if body is None or body["metadata"].get("deletionTimestamp"):
            self._memory.forget(key)
            self._queue.forget(key)
            self.gone.pop(key, None)
            return None
        uid, before = body["metadata"]["uid"], body["status"]
        try:
            pool = read_pool(body)
        except ValueError as error:
            generation = body["metadata"].get("generation", 0)
            await self._executor.write_status(
                key, uid, before, unreadable(before, generation, str(error), self._clock())
            )
            return RESYNC
        if await self._restored(key, uid):
            return RESTORE_DELAY
        made = plan(observe(key, pool, self._cache, self._memory), self._settings, self._clock())
        refusals = await self._executor.execute(key, made.actions)
        news = self._memory.refused(key, refusals)
        if news:
            made = plan(observe(key, pool, self._cache, self._memory), self._settings, self._clock())
        await self._executor.write_status(key, uid, before, made.status)
        if refusals:
            if news:
                _log.warning("%s/%s: %s %s: %s", *key, refusals[0].kind, refusals[0].name, refusals[0].message)
            return self._queue.failed(key)
        self._queue.succeeded(key)
        return min(RESYNC, made.requeue_after or RESYNC)

    async def _restored(self, key: PoolKey, uid: str) -> bool:
        """Look whether groups that were reported as gone have only lost their labels."""
        found = [await self._executor.restore_labels(key, uid, name) for name in sorted(self.gone.get(key, ()))]
        self.gone.pop(key, None)
        return any(found)
