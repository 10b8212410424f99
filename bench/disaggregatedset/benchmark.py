"""The same groups and the same rolling update, made by Twinpool's operator and by LWS's DisaggregatedSet controller."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import yaml

from bench.disaggregatedset.controllers import Controller, manager, operator
from bench.disaggregatedset.kubelet import VERSION, Kubelet
from bench.harness.cell import Cell
from bench.harness.cpu import cpu_seconds
from twinpool.core import protocol
from twinpool.localcluster import cluster as clusters
from twinpool.localcluster.progress import Progress
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twinpool.localcluster.cluster import LocalCluster

TITLE = "groups and a rolling update, beside LWS's DisaggregatedSet"
PREFILL, DECODE = 2, 4
_NOTE = (
    "beside: LWS's controller with its webhooks, from the sources of TWINPOOL_LWS. Groups of one pod, surge 1, "
    "unavailable 0, no routers. No engine runs: pods are said to be ready at once. Requests are those that change "
    "something, by each controller's own metrics; ours include its Lease."
)


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Start a control plane without nodes and both controllers, and give the cells."""
    sets = 4 if quick else 20
    with contextlib.ExitStack() as stack:
        name = next(name for i in itertools.count() if clusters.is_free(name := f"bench-{i}"))
        cluster = stack.enter_context(clusters.running(name, progress=Progress()))
        _without_nodes(cluster, stack)
        sides = []
        for namespace, controller, pool in (("ours", operator, twinpool), ("beside", manager, disaggregated_set)):
            cluster.kubectl("create", "namespace", namespace)
            made = stack.enter_context(controller(cluster, namespace))
            kubelet = stack.enter_context(Kubelet(cluster.kubeconfig, namespace))
            sides.append(Side(cluster, namespace, made, kubelet, pool, sets))
        ours, beside = sides
        groups = f"{sets} sets of {PREFILL} prefill and {DECODE} decode groups"
        yield [
            Cell(f"{groups}: until all pods exist", "s", ours.create, beside.create, note=_NOTE),
            Cell("... requests until all is quiet", "requests", lambda: ours.requests, lambda: beside.requests),
            Cell("... controller CPU", "s CPU", lambda: ours.cpu, lambda: beside.cpu),
            Cell("rolling update of all of them", "s", ours.update, beside.update),
            Cell("... requests until all is quiet", "requests", lambda: ours.requests, lambda: beside.requests),
            Cell("... controller CPU", "s CPU", lambda: ours.cpu, lambda: beside.cpu),
        ]


def _without_nodes(cluster: LocalCluster, stack: contextlib.ExitStack) -> None:
    """Let nobody but controllers act: no kubelet runs what is made, no scheduler looks for a place."""
    for node in cluster.nodes:
        cluster.kill_node(node)
    scheduler = cluster.status()["components"]["kube-scheduler"]
    os.kill(scheduler, signal.SIGSTOP)
    stack.callback(os.kill, scheduler, signal.SIGCONT)


class Side:
    """One controller with its namespace. ``requests`` and ``cpu`` are those of the last sample."""

    def __init__(
        self,
        cluster: LocalCluster,
        namespace: str,
        controller: Controller,
        kubelet: Kubelet,
        manifest: Callable[[int, str], dict[str, Any]],
        sets: int,
    ) -> None:
        self._cluster, self._namespace, self._controller, self._kubelet = cluster, namespace, controller, kubelet
        self._manifest, self._sets = manifest, sets
        self._version = 0
        self.requests = self.cpu = 0.0

    @property
    def _pods(self) -> int:
        return self._sets * (PREFILL + DECODE)

    def create(self) -> float:
        """Make the sets, after those of the last run are gone, and return the seconds until their pods exist."""
        self._kubectl("delete", "-f", "-", "--ignore-not-found", "--wait=false")
        wait_until(lambda: not self._kubelet.count(), 120, "the pods of the last run are gone")
        self._quiet()
        return self._timed(lambda: self._kubelet.count() >= self._pods)

    def update(self) -> float:
        """Change the pods of every set, and return the seconds until all pods are new and ready."""
        return self._timed(lambda: self._kubelet.whole(str(self._version), self._pods))

    def _timed(self, done: Callable[[], bool]) -> float:
        self._version += 1
        writes, cpu, began = self._controller.writes(), cpu_seconds(self._controller.pid), time.monotonic()
        self._kubectl("apply", "--server-side", "-f", "-")
        wait_until(done, 300, "the pods are there", interval=0.02)
        took = time.monotonic() - began
        wait_until(lambda: self._kubelet.whole(str(self._version), self._pods), 300, "all pods are ready")
        self._quiet()
        self.requests = self._controller.writes() - writes
        self.cpu = cpu_seconds(self._controller.pid) - cpu
        return took

    def _quiet(self) -> None:
        """Wait until the controller writes no more than a Lease."""

        def still() -> bool:
            before = self._controller.writes()
            time.sleep(2)
            return self._controller.writes() - before <= 1

        wait_until(still, 120, "nothing is left to do")

    def _kubectl(self, *arguments: str) -> None:
        bodies = [self._manifest(number, str(self._version)) for number in range(self._sets)]
        text = yaml.safe_dump_all(bodies)
        self._cluster.kubectl("-n", self._namespace, *arguments, input=text, timeout=120)


def twinpool(number: int, version: str) -> dict[str, Any]:
    """Return a pool."""
    role = {"resources": {"gpu": {"perNode": 0}}, "podTemplate": {"metadata": {"annotations": {VERSION: version}}}}
    spec = {
        "model": {"name": "bench"},
        "engine": {"kind": "simulated"},
        "prefill": {**role, "replicas": PREFILL},
        "decode": {**role, "replicas": DECODE},
        "routing": {"replicas": 0},
        "rollout": {"maxSurge": 1, "maxUnavailable": 0},
    }
    return _object(protocol.API_VERSION, protocol.KIND, number, spec)


def disaggregated_set(number: int, version: str) -> dict[str, Any]:
    """Return a DisaggregatedSet of the same size."""
    container = {"name": "engine", "image": "bench"}
    pods = {"metadata": {"annotations": {VERSION: version}}, "spec": {"containers": [container]}}
    rolling = {"maxSurge": 1, "maxUnavailable": 0}
    roles = [
        {
            "name": name,
            "spec": {
                "replicas": count,
                "leaderWorkerTemplate": {"size": 1, "workerTemplate": pods},
                "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling},
            },
        }
        for name, count in (("prefill", PREFILL), ("decode", DECODE))
    ]
    return _object("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet", number, {"roles": roles})


def _object(api_version: str, kind: str, number: int, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": f"set-{number}"}, "spec": spec}
