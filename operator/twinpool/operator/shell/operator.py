"""The running operator: watches, workers, Lease and health endpoint, started and stopped in the right order.

Stopping matters: the workers end first, then the Lease is given back, so that a follower takes over at once and two
operators never write at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from dataclasses import dataclass, field, replace

import kopf

from twinpool.operator.logic import compute_domain
from twinpool.operator.logic.settings import Settings
from twinpool.operator.shell.apply import Executor
from twinpool.operator.shell.audit import Audit
from twinpool.operator.shell.autoscaler import Autoscaler
from twinpool.operator.shell.cluster import Cluster, configuration
from twinpool.operator.shell.complaints import Complaints
from twinpool.operator.shell.health import STUCK_AFTER, health_application, serve
from twinpool.operator.shell.journal import Journal
from twinpool.operator.shell.lease import Leadership, LeaseTimes
from twinpool.operator.shell.loop import Reconciler
from twinpool.operator.shell.metrics import Metrics
from twinpool.operator.shell.nodes import NodeReader
from twinpool.operator.shell.observe import Memory
from twinpool.operator.shell.placer import Placer
from twinpool.operator.shell.questions import EngineLives, Preflights, RouterBooks, WeightLoads
from twinpool.operator.shell.queue import WorkQueue
from twinpool.operator.shell.recorder import Recorder
from twinpool.operator.shell.selfcheck import compute_domains, problem, sees_nodes
from twinpool.operator.shell.streams import SILENT_AFTER, Streams
from twinpool.operator.shell.watch import Cache, PoolKey, kinds, watch_registry, watch_settings

_log = logging.getLogger(__name__)

#: Pools that are reconciled at the same time.
WORKERS = 4
#: Seconds between two looks for what is missing before the operator can begin: its CRD, its rights.
CHECK_RETRY = 2.0
#: Seconds for a reconciliation that is running when the operator is told to stop.
STOP_TIMEOUT = 5.0


@dataclass(frozen=True, slots=True)
class Options:
    """How this operator was started."""

    identity: str
    host: str = "0.0.0.0"  # noqa: S104 - the kubelet's probes come from outside the pod
    port: int = 8080
    #: Namespace to serve; empty serves all.
    namespace: str = ""
    lease_namespace: str = "twinpool-system"
    lease_name: str = "twinpool-operator"
    settings: Settings = field(default_factory=Settings)
    times: LeaseTimes = field(default_factory=LeaseTimes)


class Operator:
    """One operator process."""

    def __init__(self, options: Options, cluster: Cluster, metrics: Metrics) -> None:
        self._options = options
        self._metrics = metrics
        self._cluster = cluster
        self._cache = Cache()
        self._queue: WorkQueue[PoolKey] = WorkQueue()
        self._memory = Memory()
        self._problem = "the API server has not answered yet"
        self._synced = False
        #: Kinds that not every cluster serves and this one does.
        self._served: tuple[str, ...] = ()
        self._journal = Journal()
        self._audit = Audit(cluster, self._cache, options.namespace, self._seen)
        self._streams = Streams(self._audit.ask)
        self._leadership = Leadership(
            cluster,
            options.lease_namespace,
            options.lease_name,
            options.identity,
            options.times,
            changed=self._leader_changed,
        )
        recorder = Recorder(cluster, options.identity)
        executor = Executor(cluster, self._leadership, self._memory, metrics, recorder)
        self._books, self._lives = RouterBooks(self._queue.add), EngineLives(self._queue.add)
        self._autoscaler = Autoscaler(self._queue.add)
        self._preflights, self._weights = Preflights(self._queue.add), WeightLoads(self._queue.add)
        self._placer = Placer(cluster, self._cache, self._leadership, options.settings.topology, self._queue.add)
        self._reconciler = Reconciler(
            self._cache,
            self._queue,
            self._leadership,
            executor,
            self._memory,
            options.settings,
            metrics,
            self._books,
            self._lives,
            journal=self._journal,
            complaints=Complaints(cluster),
            placer=self._placer,
            autoscaler=self._autoscaler,
            preflights=self._preflights,
            weights=self._weights,
            nodes=NodeReader(cluster),
        )
        metrics.queue_depth.set_function(lambda: len(self._queue))
        metrics.queue_age.set_function(self._queue.age)
        metrics.silent_watches.set_function(lambda: len(self._streams.silent()))

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT, or until a watch fails for good (which ends the process with an error)."""
        application = health_application(self._not_ready, self._stuck, self._metrics, self._journal)
        runner = await serve(application, self._options.host, self._options.port)
        stop = asyncio.Event()
        _stop_on_signals(stop)
        try:
            if await self._can_begin(stop):
                await self._look_around()
                await self._run_until(stop)
        finally:
            await runner.cleanup()

    async def _look_around(self) -> None:
        """Find out what can be done here; an operator of one namespace knows nothing of the others' nodes."""
        seen = not self._options.namespace and await sees_nodes(self._cluster)
        if not seen:
            _log.info("nodes are left to kube-scheduler: they may not be read, or only one namespace is served")
        domains = await compute_domains(self._cluster, self._options.namespace)
        if domains == "Served":
            self._served = (compute_domain.KIND,)
            self._audit.kinds = kinds(self._served)
        self._reconciler.settings = replace(self._options.settings, sees_nodes=seen, compute_domains=domains)

    async def _run_until(self, stop: asyncio.Event) -> None:
        workers = [asyncio.create_task(self._reconciler.work(), name=f"worker-{n}") for n in range(WORKERS)]
        lease = asyncio.create_task(self._leadership.run(), name="lease")
        placer = asyncio.create_task(self._placer.run(), name="placer")
        audit = asyncio.create_task(self._complete_then_audit(), name="audit")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        ended = asyncio.Event()
        watching = asyncio.create_task(self._watch(stop, ended), name="watches")
        try:
            tasks = [*workers, lease, placer, audit, stopping, watching]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            failed = [task for task in done if task is not stopping]
        finally:
            await self._stop(workers, lease, placer, audit)
            stopping.cancel()
            ended.set()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        for task in failed:
            task.result()
            raise RuntimeError(f"the task {task.get_name()} ended although nobody stopped it")

    async def _stop(self, workers: list[asyncio.Task[None]], *others: asyncio.Task[None]) -> None:
        """Let running reconciliations end, stop the rest, and give the Lease back."""
        await self._reconciler.drain(STOP_TIMEOUT)
        for task in (*workers, *others):
            task.cancel()
        await asyncio.gather(*workers, *others, return_exceptions=True)
        await self._books.close()
        await self._lives.close()
        await self._autoscaler.close()
        await self._preflights.close()
        await self._weights.close()
        await self._leadership.release()

    async def _watch(self, stop: asyncio.Event, ended: asyncio.Event) -> None:
        namespaces = [self._options.namespace] if self._options.namespace else []
        tasks = await kopf.spawn_tasks(
            registry=watch_registry(self._cache, self._seen, self._streams, self._served),
            settings=watch_settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=namespaces,
            stop_flag=ended,
        )
        _stop_on_signals(stop)  # kopf has just taken the signals for itself
        await kopf.run_tasks(tasks, ignored=asyncio.all_tasks() - set(tasks))

    async def _can_begin(self, stop: asyncio.Event) -> bool:
        """Wait for CRD and rights; kopf would never notice a CRD that comes later, since it scans nothing."""
        options, told = self._options, ""
        while not stop.is_set():
            self._problem = await problem(self._cluster, options.namespace, options.lease_namespace, options.lease_name)
            if not self._problem:
                return True
            if self._problem != told:
                _log.warning("%s", self._problem)
                told = self._problem
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), CHECK_RETRY)
        return False

    async def _complete_then_audit(self) -> None:
        await self._audit.complete(self._streams)
        _log.info("the caches are complete: %d pools", len(self._cache.pools()))
        self._synced = True
        self._look_at_all()
        await self._audit.run()

    def _seen(self, key: PoolKey, gone: str) -> None:
        self._metrics.last_event.set(time.time())
        # Half-filled caches would be taken for lost objects.
        if self._synced:
            self._reconciler.event(key, gone)

    def _look_at_all(self) -> None:
        for key in self._cache.pools():
            self._queue.add(key)

    def _leader_changed(self, ours: bool) -> None:
        self._metrics.leader.set(int(ours))
        if not ours:
            self._books.forget_all()
            self._lives.forget_all()
            self._preflights.forget_all()
            self._weights.forget_all()
            self._placer.forget_all()
            self._metrics.pools.forget_all()
            self._autoscaler.forget_all()
        if ours and self._synced:
            self._look_at_all()

    def _not_ready(self) -> str:
        if self._problem:
            return self._problem
        if self._cluster.unauthorized:
            return "the API server does not accept the operator's credentials (401)"
        return "" if self._synced else "the caches are not filled yet"

    def _stuck(self) -> str:
        now = asyncio.get_running_loop().time()
        stuck = [key for key, began in self._reconciler.running.items() if now - began > STUCK_AFTER]
        if stuck:
            return f"reconciling {'/'.join(stuck[0])} does not end"
        silent, since = self._streams.silent(), self._cluster.answering_since
        # While the API server is away every watch is silent, and a restart would mend nothing.
        if silent and since is not None and now - since > SILENT_AFTER:
            return f"the watch of {silent[0]} receives nothing although the API server answers"
        return ""


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def run_operator(options: Options) -> None:
    """Connect and run until stopped."""
    metrics = Metrics()
    cluster = Cluster(await configuration(), metrics, configuration)
    try:
        await Operator(options, cluster, metrics).run()
    finally:
        await cluster.close()
