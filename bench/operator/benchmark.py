"""The operator on a real API server with the objects of a large cluster, which nothing but the operator acts upon."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.cell import Bar, Cell
from bench.harness.cpu import cpu_seconds
from bench.harness.server import free_port, started
from bench.operator.api import Api
from bench.operator.objects import DECODE, NAMESPACE, PODS, POOLS, Size, create, status
from twinpool.core import protocol
from twinpool.localcluster import cluster as clusters
from twinpool.localcluster.progress import Progress
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import LocalCluster

TITLE = "operator: a large cluster"
_ROOT = Path(__file__).resolve().parents[2]
_HOST = "127.0.0.1"
_DONE = 'twinpool_operator_reconciles_total{result="done"}'
_EVENTS_PER_SECOND = 20
_ALONE = (
    "Nothing stands beside: controller manager, scheduler and kubelets are stopped, so that only the operator acts."
)


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Start a control plane, fill it, and give the cells of the operator that runs on it."""
    size = Size(50, 2_000, 200) if quick else Size()
    with _filled(size) as cluster, Subject(cluster, size, quick) as subject:
        amount = f"{size.pools} pools, {size.pods} pods, {size.strangers} foreign pods, {size.nodes} nodes"
        yield [
            Cell(f"restart, {amount}: all planned", "s", subject.restart, bar=Bar("ours", at_most=60.0), note=_ALONE),
            Cell("... of which CPU", "s CPU", lambda: subject.restart_cpu),
            Cell("idle", "cores", subject.idle, bar=Bar("ours", at_most=0.05)),
            Cell("resident memory", "MiB", subject.memory, bar=Bar("ours", at_most=500.0)),
            Cell(
                f"event to write at {_EVENTS_PER_SECOND} events/s, p99",
                "ms",
                subject.reaction,
                bar=Bar("ours", at_most=500.0),
                note="event to write: from the change of a pod's readiness until a watch shows the pool's new status.",
            ),
        ]


@contextmanager
def _filled(size: Size) -> Iterator[LocalCluster]:
    name = next(name for i in itertools.count() if clusters.is_free(name := f"bench-{i}"))
    with clusters.running(name, progress=Progress()) as cluster, _only_the_api_server(cluster):
        cluster.kubectl("apply", "--server-side", "-f", str(_ROOT / "crds"))
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        began = time.monotonic()
        asyncio.run(_create(cluster, size))
        print(f"created in {time.monotonic() - began:.0f} s", file=sys.stderr)
        yield cluster


@contextmanager
def _only_the_api_server(cluster: LocalCluster) -> Iterator[None]:
    """Stop everything that would act on the objects: they have no processes, and that would be noticed."""
    for node in cluster.nodes:
        cluster.kill_node(node)
    components = cluster.status()["components"]
    others = [components[name] for name in ("kube-controller-manager", "kube-scheduler")]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


async def _create(cluster: LocalCluster, size: Size) -> None:
    async with Api(cluster.kubeconfig) as api:
        await create(api, size)


class Subject:
    """The operator under test; restarted for every sample of the first cell and kept for the others."""

    def __init__(self, cluster: LocalCluster, size: Size, quick: bool) -> None:
        self._cluster = cluster
        self._size = size
        self._seconds = 5.0 if quick else 20.0
        self._running = contextlib.ExitStack()
        self._pid = self._port = 0
        self.restart_cpu = 0.0

    def __enter__(self) -> Subject:
        """Start once, so that the pools have their first status: a restart is what is measured."""
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the operator."""
        self._running.close()

    def restart(self) -> float:
        """Stop the operator, start it, and return the seconds until every pool was planned."""
        self._running.close()
        return self._start()

    def _start(self) -> float:
        self._port = free_port()
        command = [sys.executable, "-m", "twinpool.operator", f"--host={_HOST}", f"--port={self._port}"]
        command += [f"--lease-namespace={NAMESPACE}", "--log-level=warning"]
        environment = {"KUBECONFIG": str(self._cluster.kubeconfig)}
        began = time.monotonic()
        self._pid = self._running.enter_context(started(command, host=_HOST, port=self._port, env=environment))
        wait_until(lambda: self._metric(_DONE) >= self._size.pools, 300, "every pool is planned", interval=0.1)
        seconds = time.monotonic() - began
        self.restart_cpu = cpu_seconds(self._pid)
        wait_until(self._quiet, 120, "nothing is left to do", interval=0.5)
        return seconds

    def _quiet(self) -> bool:
        before = self._metric('twinpool_operator_api_requests_total{code="200",verb="PATCH"}')
        time.sleep(2)
        after = self._metric('twinpool_operator_api_requests_total{code="200",verb="PATCH"}')
        return before == after and not self._metric("twinpool_operator_queue_depth")

    def _metric(self, line: str) -> float:
        with urllib.request.urlopen(f"http://{_HOST}:{self._port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return sum(float(entry.rsplit(" ", 1)[1]) for entry in text.splitlines() if entry.startswith(line))

    def idle(self) -> float:
        """Return the cores used while nothing happens."""
        before, began = cpu_seconds(self._pid), time.monotonic()
        time.sleep(self._seconds)
        return (cpu_seconds(self._pid) - before) / (time.monotonic() - began)

    def memory(self) -> float:
        """Return the resident memory in MiB."""
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

    def reaction(self) -> float:
        """Return the 99th percentile of the milliseconds from an event to the write that follows from it."""
        took = asyncio.run(self._reactions())
        return statistics.quantiles(took, n=100)[98] * 1000

    async def _reactions(self) -> list[float]:
        async with Api(self._cluster.kubeconfig) as api:
            pods = [pod for pod in (await api.send("GET", PODS))["items"] if _is_decode(pod)]
            one_each = {pod["metadata"]["labels"][protocol.LABEL_POOL]: pod for pod in pods}
            version = (await api.send("GET", POOLS))["metadata"]["resourceVersion"]
            clock = Stopwatch()
            watching = asyncio.create_task(clock.watch(api, version))
            for number in range(int(self._seconds * _EVENTS_PER_SECOND)):
                name = sorted(one_each)[number % len(one_each)]
                await clock.change(api, one_each[name], ready=bool(number // len(one_each) % 2))
                await asyncio.sleep(1 / _EVENTS_PER_SECOND)
            await clock.last()
            await api.send_all(("PATCH", _status_of(pod), status(pod)) for pod in one_each.values())
            watching.cancel()
            return clock.took


def _is_decode(pod: dict[str, Any]) -> bool:
    return bool(pod["metadata"].get("labels", {}).get(protocol.LABEL_ROLE) == "decode")


def _status_of(pod: dict[str, Any]) -> str:
    return f"{PODS}/{pod['metadata']['name']}/status"


class Stopwatch:
    """Times from a change of a pod to the pool's status that says so."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self._asked: dict[tuple[str, int], float] = {}

    async def change(self, api: Api, pod: dict[str, Any], ready: bool) -> None:
        """Make a pod ready or not, and start the time."""
        name = pod["metadata"]["labels"][protocol.LABEL_POOL]
        self._asked[name, DECODE if ready else DECODE - 1] = time.monotonic()
        await api.send("PATCH", _status_of(pod), status(pod, ready), "application/merge-patch+json")

    async def watch(self, api: Api, version: str) -> None:
        """Stop the times of the statuses that are seen."""
        async for event in api.watch(POOLS, version):
            stored = event["object"]
            key = (stored["metadata"]["name"], stored["status"]["decode"]["ready"])
            if key in self._asked:
                self.took.append(time.monotonic() - self._asked.pop(key))

    async def last(self) -> None:
        """Wait for what is still on its way; what never comes counts as the time that was waited."""
        end = time.monotonic() + 10
        while self._asked and time.monotonic() < end:  # noqa: ASYNC110 - the watch tells nobody but us
            await asyncio.sleep(0.1)
        self.took += [time.monotonic() - asked for asked in self._asked.values()]
