"""The loop: take a pool from the queue, observe, plan, execute. Nothing here decides what should be."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any

from twinpool.operator.logic import distances, interconnect, loading, restarts
from twinpool.operator.logic.asking import hold, to_ask
from twinpool.operator.logic.figures import figures
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.pinning import shortages, undecided
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.status import unreadable
from twinpool.operator.shell.apply import Executor, NotLeader
from twinpool.operator.shell.cluster import ApiRefused
from twinpool.operator.shell.journal import Journal
from twinpool.operator.shell.observe import Memory, observe, read_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.observed import Observed
    from twinpool.operator.logic.settings import Settings
    from twinpool.operator.shell.autoscaler import Autoscaler
    from twinpool.operator.shell.complaints import Complaints
    from twinpool.operator.shell.lease import Leadership
    from twinpool.operator.shell.metrics import Metrics
    from twinpool.operator.shell.nodes import NodeReader
    from twinpool.operator.shell.placer import Placer
    from twinpool.operator.shell.questions import EngineLives, Preflights, RouterBooks, WeightLoads
    from twinpool.operator.shell.queue import WorkQueue
    from twinpool.operator.shell.watch import Cache, PoolKey

_log = logging.getLogger(__name__)

#: Seconds after which a pool is looked at even if nothing happened.
RESYNC = 300.0
#: Seconds between two writes of one pool's status: a pod that flaps makes no storm.
STATUS_PAUSE = 1.0
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
        books: RouterBooks,
        lives: EngineLives,
        clock: Callable[[], float] = time.time,
        journal: Journal | None = None,
        complaints: Complaints | None = None,
        placer: Placer | None = None,
        autoscaler: Autoscaler | None = None,
        preflights: Preflights | None = None,
        weights: WeightLoads | None = None,
        nodes: NodeReader | None = None,
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._leadership = leadership
        self._executor = executor
        self._memory = memory
        #: May be replaced before the first pool is looked at, by what the cluster turned out to allow.
        self.settings = settings
        self._metrics = metrics
        self._books = books
        self._lives = lives
        self._clock = clock
        self._journal = journal or Journal()
        #: When each pool's status was written last, and when its first unanswered event came, by the loop's clock.
        self._told: dict[PoolKey, float] = {}
        self._asked: dict[PoolKey, float] = {}
        self._complaints = complaints
        self._placer = placer
        self._autoscaler = autoscaler
        self._preflights = preflights
        self._weights = weights
        self._nodes = nodes
        #: When each reconciliation that is running began, by the loop's clock.
        self.running: dict[PoolKey, float] = {}
        #: Groups that a watch reported as gone since the pool was last looked at.
        self.gone: dict[PoolKey, set[str]] = {}
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def event(self, key: PoolKey, gone: str) -> None:
        """Look at a pool soon, since something of it changed; ``gone`` names a group that a watch reported as gone."""
        if gone:
            self.gone.setdefault(key, set()).add(gone)
        if self._leadership.held.is_set():
            self._asked.setdefault(key, asyncio.get_running_loop().time())
        self._queue.add(key)

    async def work(self) -> None:
        """Reconcile pools until cancelled or drained; only while the Lease is held."""
        while not self._draining:
            await self._leadership.held.wait()
            key = await self._queue.get()
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
        asked = self._asked.pop(key, None)
        with self._metrics.reconcile_seconds.time():
            try:
                again = await self._reconcile(key)
            except NotLeader:
                self._metrics.reconciles.labels("not_leader").inc()
                self._queue.add_after(key, LEASE_DELAY)
            except ApiRefused as error:
                self._metrics.reconciles.labels("api_error").inc()
                delay = self._queue.failed(key, error.retry_after)
                _log.warning("%s/%s: %s; trying again in %.1f s", *key, error, delay)
            except Exception:
                self._metrics.reconciles.labels("bug").inc()
                _log.exception("%s/%s: reconciling failed; trying again in %.1f s", *key, self._queue.failed(key))
            else:
                self._metrics.reconciles.labels("done").inc()
                if asked is not None:
                    self._metrics.reaction_seconds.observe(asyncio.get_running_loop().time() - asked)
                if again is not None:
                    self._queue.add_after(key, again)

    async def _reconcile(self, key: PoolKey) -> float | None:
        """Bring one pool closer to its spec; return the seconds after which to look again, None for never."""
        body = self._cache.pool(key)
        if body is None or body["metadata"].get("deletionTimestamp"):
            self._forget(key)
            return None
        # status.scaling has a writer of its own.
        uid, before = body["metadata"]["uid"], {k: part for k, part in body["status"].items() if k != "scaling"}
        try:
            pool = read_pool(body)
        except ValueError as error:
            generation = body["metadata"].get("generation", 0)
            said = unreadable(before, generation, str(error), self._clock())
            return await self._tell(key, uid, before, said) or RESYNC
        if await self._restored(key, uid):
            return RESTORE_DELAY
        listening = await self._complaints.listen(key, self._observe(key, pool)) if self._complaints else None
        observed = self._observe(key, pool)
        if hold(observed):
            return RESYNC
        observed = await self._with_labels(observed)
        self._wake_placer(observed)
        made = plan(observed, self.settings, self._clock())
        result = "not carried out"
        try:
            refusals = await self._executor.execute(key, made.actions)
            result = "; ".join(f"{item.kind} {item.name} was refused: {item.message}" for item in refusals) or "done"
        finally:
            self._journal.note(key, self._clock(), observed, made.actions, made.status, result)
        news = self._memory.refused(key, refusals)
        if news:
            made = plan(self._observe(key, pool), self.settings, self._clock())
        self._metrics.pools.tell(key, figures(pool, made.status, observed.scaling))
        wait = await self._tell(key, uid, before, made.status)
        if refusals:
            if news:
                _log.warning("%s/%s: %s %s: %s", *key, refusals[0].kind, refusals[0].name, refusals[0].message)
            return self._queue.failed(key)
        self._queue.succeeded(key)
        if self._memory.tried(key) != observed.tried:
            return 0.0  # no event tells that a trial went well
        return min(RESYNC, made.requeue_after or RESYNC, wait or RESYNC, listening or RESYNC)

    def _forget(self, key: PoolKey) -> None:
        """Forget a pool that is gone."""
        memories = (self._memory, self._queue, self._journal, self._executor, self._books, self._lives)
        for forget in (memory.forget for memory in memories):
            forget(key)
        for forget in [more.forget for more in self._optional() if more]:
            forget(key)
        self.gone.pop(key, None)
        self._told.pop(key, None)
        self._metrics.pools.forget(key)

    def _optional(self) -> tuple[Complaints | Preflights | WeightLoads | Autoscaler | None, ...]:
        return self._complaints, self._preflights, self._weights, self._autoscaler

    async def _with_labels(self, observed: Observed) -> Observed:
        """Add the labels of nodes between which something was measured just now, or whose pods have no place yet."""
        found = groups(observed)
        wanted = interconnect.to_read(observed, found)
        wanted |= distances.to_read(observed.pool, found, self.settings.topology)
        if not wanted or not self._nodes or not self.settings.sees_nodes:
            return observed
        return dataclasses.replace(observed, node_labels=await self._nodes.labels(wanted))

    def _wake_placer(self, observed: Observed) -> None:
        """Have nodes chosen for pods that wait; any change of the pool may have made room for them."""
        if self._placer and undecided(observed, groups(observed)):
            self._placer.wake()
        elif self._placer and shortages(observed, groups(observed)):
            self._placer.look_again()

    async def _tell(self, key: PoolKey, uid: str, before: Mapping[str, Any], status: Mapping[str, Any]) -> float | None:
        """Write a status that changed, at most once a second; return the seconds to wait when it is too early."""
        if before == status:
            return None
        now = asyncio.get_running_loop().time()
        wait = self._told.get(key, float("-inf")) + STATUS_PAUSE - now
        if wait > 0:
            return wait
        self._told[key] = now
        await self._executor.write_status(key, uid, before, status)
        return None

    def _observe(self, key: PoolKey, pool: InferencePool) -> Observed:
        """Return what is known of a pool, and have its pods asked for as long as something waits for what they say."""
        said = self._complaints.of(key) if self._complaints else {}
        observed = observe(key, pool, self._cache, self._memory, self._clock(), said)
        # Read before an engine that is ready again is asked no more: what it said meanwhile still counts.
        lives = {uid: life for uid, life in (self._lives.answers(key) or {}).items() if life is not None}
        observed = self._autoscaler.look(key, observed) if self._autoscaler else observed
        self._books.follow(key, to_ask(observed))
        self._lives.follow(key, restarts.to_ask(groups(observed)))
        links: Mapping[str, Any] = {}
        if self._preflights:
            links = {uid: item for uid, item in (self._preflights.answers(key) or {}).items() if item is not None}
            self._preflights.follow(key, interconnect.to_ask(groups(observed)))
        weights: Mapping[str, Any] = {}
        if self._weights:
            weights = {uid: item for uid, item in (self._weights.answers(key) or {}).items() if item is not None}
            self._weights.follow(key, loading.to_ask(groups(observed)))
        verdicts = self._placer.verdicts(key) if self._placer else {}
        return dataclasses.replace(
            observed,
            reports=self._books.answers(key),
            lives=lives,
            verdicts=verdicts,
            preflights=links,
            weights=weights,
        )

    async def _restored(self, key: PoolKey, uid: str) -> bool:
        """Look whether groups that were reported as gone have only lost their labels."""
        found = [await self._executor.restore_labels(key, uid, name) for name in sorted(self.gone.get(key, ()))]
        self.gone.pop(key, None)
        return any(found)
