"""What the operator's tests share: pools, and a model of the API server with its controllers."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import protocol
from twinpool.core.spec import InferencePool
from twinpool.operator.logic import books, names
from twinpool.operator.logic.actions import (
    Action,
    Annotate,
    Apply,
    Delete,
    HandOver,
    PutBack,
    Retire,
    ScaleToZero,
    SetGate,
    TakeBack,
    Try,
    WriteScaling,
)
from twinpool.operator.logic.books import Entry, Report, Reports
from twinpool.operator.logic.merge import merge
from twinpool.operator.logic.observed import Child, Observed, PodView, read_child
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twinpool.operator.logic.restarts import Life

Body = dict[str, Any]

#: Seconds that a pod takes to stop in the model.
GRACE = 20.0


def build_pool(spec: Body | None = None, **changes: Any) -> InferencePool:
    """Return a pool with one prefill and one decode group; ``spec`` is merged in, ``changes`` replace blocks."""
    base: Body = {"model": {"name": "acme/model"}, "prefill": {"replicas": 1}, "decode": {"replicas": 1}}
    merged = {**merge(base, spec or {}), **changes}
    metadata = {"name": "demo", "namespace": "team", "uid": "uid-pool", "generation": 1}
    return InferencePool.model_validate({"metadata": metadata, "spec": merged})


class ModelCluster:
    """Objects in a dictionary, and controllers that run when told to. Knows nothing of how plans are made."""

    def __init__(self, pool: InferencePool) -> None:
        self.pool = pool
        self.now = 1_000_000.0
        self.objects: dict[tuple[str, str], Body] = {}
        self.pods: dict[str, PodView] = {}
        self.created_groups: list[str] = []
        self._incarnations: dict[str, int] = {}
        #: Requests that every worker has in flight.
        self.busy = 0
        #: What the launchers of leaders say.
        self.lives: dict[str, Life] = {}
        #: Sets that the API server took in a dry run, as an operator that does not restart remembers them.
        self.tried: frozenset[tuple[str, str]] = frozenset()
        self._version = 0

    def version(self) -> str:
        self._version += 1
        return str(self._version)

    def observed(self) -> Observed:
        children = tuple(read_child(kind, copy.deepcopy(body)) for (kind, _), body in self.objects.items())
        pods, reports = tuple(self.pods.values()), self.reports()
        return Observed(self.pool, children, pods, reports=reports, lives=self.lives, tried=self.tried)

    def reports(self) -> Reports:
        """What routers say that see every pod at once: they admit what is ready and send nothing to what is marked."""
        entries = {}
        for pod in self.pods.values():
            going = pod.draining or pod.deadline is not None
            entries[pod.uid] = Entry(pod.containers_ready and not going, going, in_flight=self.busy)
        return {pod.name: Report(entries) for pod in books.routers(self.pods.values())}

    def reconcile(self, settings: Settings | None = None, upto: int | None = None) -> int:
        """Plan, carry out the first ``upto`` actions (or all, and the status) and return how many were planned."""
        made = plan(self.observed(), settings or Settings(), self.now)
        for action in made.actions[:upto]:
            self.carry_out(action)
        if upto is None:
            kept = {} if self.pool.status.scaling is None else {"scaling": self.pool.status.scaling}
            self._store_status({**made.status, **kept})
        return len(made.actions)

    def _store_status(self, status: Mapping[str, Any]) -> None:
        self.pool = InferencePool.model_validate(
            {"metadata": self.pool.metadata, "spec": self.pool.spec, "status": status}
        )

    def planned(self) -> tuple[Action, ...]:
        """Return what would be done now."""
        return plan(self.observed(), Settings(), self.now).actions

    def carry_out(self, action: Action) -> None:
        match action:
            case Apply(body, uid):
                self._apply(copy.deepcopy(dict(body)), uid)
            case Try(_, revision, role):
                self.tried |= {(revision, role)}
            case Retire() | PutBack() | ScaleToZero():
                self._leave(action)
            case SetGate(name, uid, opened):
                self._pod(name, uid, routable=opened)
            case Annotate(kind, name, uid, key, value):
                self._annotate(kind, name, uid, key, value)
            case HandOver(name, uid, node):
                self._pod(name, uid, scheduling_gates=(), affinity=None, pinned=node)
            case TakeBack(name, uid):
                self._pod(name, uid, deadline=self.now)
            case WriteScaling(_, uid, _, scaling):
                assert uid == self.pool.metadata.uid
                status = self.pool.status.model_dump(exclude={"scaling"}, exclude_none=True)
                self._store_status({**status, **({} if scaling is None else {"scaling": scaling})})
            case Delete(kind, name, uid, resource_version):
                self._exact(kind, name, uid, resource_version)
                del self.objects[kind, name]

    def _leave(self, action: Retire | PutBack | ScaleToZero) -> None:
        """Take a group out of service, or back."""
        match action:
            case Retire(name, uid, resource_version, until, kept):
                stored = self._exact("StatefulSet", name, uid, resource_version)
                marks = {names.RETIRED_ANNOTATION: "true", protocol.ANNOTATION_DRAINING: until}
                marks |= {names.KEPT_ANNOTATION: kept} if kept else {}
                self._store("StatefulSet", name, merge(stored, {"metadata": {"annotations": marks}}))
            case PutBack(name, uid, resource_version):
                stored = copy.deepcopy(self._exact("StatefulSet", name, uid, resource_version))
                for key in (names.RETIRED_ANNOTATION, protocol.ANNOTATION_DRAINING, names.KEPT_ANNOTATION):
                    stored["metadata"]["annotations"].pop(key, None)
                self._store("StatefulSet", name, stored)
            case ScaleToZero(name, uid, resource_version, _):
                stored = self._exact("StatefulSet", name, uid, resource_version)
                assert names.RETIRED_ANNOTATION in stored["metadata"]["annotations"], "scaled to 0 without a mark"
                self._store("StatefulSet", name, merge(stored, {"spec": {"replicas": 0}}))

    def _pod(self, name: str, uid: str, **changes: Any) -> None:
        assert self.pods[name].uid == uid
        self.pods[name] = self._judged(dataclasses.replace(self.pods[name], **changes))

    @staticmethod
    def _judged(pod: PodView) -> PodView:
        """Return the pod with the Ready that its kubelet would say."""
        return dataclasses.replace(pod, ready=pod.containers_ready and (pod.routable or not pod.gated))

    def _apply(self, body: Body, uid: str) -> None:
        kind, name = body["kind"], body["metadata"]["name"]
        known = self.objects.get((kind, name))
        assert (known["metadata"]["uid"] if known else "") == uid, f"{kind} {name} was observed wrongly"
        if known is None and kind == "StatefulSet":
            assert name not in self.created_groups, f"the name {name} was used before"
            self.created_groups.append(name)
        body["metadata"]["uid"] = uid or f"uid-{self.version()}"
        body["status"] = known.get("status", {}) if known else {}
        for key, value in (known["metadata"].get("annotations", {}) if known else {}).items():
            # Fields of others, which an apply leaves alone.
            if key in (protocol.ANNOTATION_LEADER, names.RESTARTS_ANNOTATION):
                body["metadata"].setdefault("annotations", {})[key] = value
        self._store(kind, name, body)

    def _annotate(self, kind: str, name: str, uid: str, key: str, value: str | None) -> None:
        if kind == "Pod":
            if key == protocol.ANNOTATION_LEADER:
                self._pod(name, uid, leader=value)
            else:
                assert key == protocol.ANNOTATION_DRAINING
                self._pod(name, uid, draining=value is not None)
        else:
            assert self.objects[kind, name]["metadata"]["uid"] == uid
            self._store(kind, name, merge(self.objects[kind, name], {"metadata": {"annotations": {key: value}}}))

    def _store(self, kind: str, name: str, body: Body) -> None:
        generation = body["metadata"].get("generation", 0) + 1
        body["metadata"].update(resourceVersion=self.version(), generation=generation)
        self.objects[kind, name] = body

    def _exact(self, kind: str, name: str, uid: str, resource_version: str) -> Body:
        stored = self.objects[kind, name]
        metadata = stored["metadata"]
        assert (metadata["uid"], metadata["resourceVersion"]) == (uid, resource_version)
        return stored

    def run_controllers(self) -> None:
        """Make the pods that sets ask for, stop those that nobody asks for, and report both."""
        wanted: dict[str, PodView] = {}
        for (kind, name), body in self.objects.items():
            labels = body["metadata"]["labels"]
            for n in range(body.get("spec", {}).get("replicas", 0)):
                group = name if kind == "StatefulSet" else ""
                revision = labels.get(protocol.LABEL_REVISION, "")
                spec = body.get("spec", {}).get("template", {}).get("spec", {})
                waits = tuple(gate["name"] for gate in spec.get("schedulingGates", []))
                wanted[f"{name}-{n}"] = PodView(
                    f"{name}-{n}",
                    labels[protocol.LABEL_ROLE],
                    group,
                    revision,
                    phase="Running",
                    scheduled=None if waits else True,
                    rank=n if group else 0,
                    address=f"10.0.0.{n + 1}",
                    gated=bool(spec.get("readinessGates")),
                    created=self.now,
                    scheduling_gates=waits,
                    affinity={} if waits else None,
                )
        for name, pod in list(self.pods.items()):
            if name not in wanted and pod.deadline is None:
                self.pods[name] = dataclasses.replace(pod, deadline=self.now + GRACE)
        for name, pod in wanted.items():
            if name not in self.pods:
                self._incarnations[name] = self._incarnations.get(name, 0) + 1
                self.pods[name] = dataclasses.replace(pod, uid=f"uid-{name}-{self._incarnations[name]}")
        self._report()

    def _report(self) -> None:
        for (kind, name), body in self.objects.items():
            if kind == "StatefulSet":
                count = sum(pod.group == name for pod in self.pods.values())
                body["status"] = {"replicas": count, "observedGeneration": body["metadata"]["generation"]}

    def end_pods(self, held: frozenset[str] = frozenset()) -> None:
        """Remove pods that were asked to go, but for those that a lost node holds."""
        self.pods = {name: pod for name, pod in self.pods.items() if pod.deadline is None or name in held}
        self._report()

    def set_ready(self, ready: bool = True, only: Callable[[PodView], bool] = lambda _: True) -> None:
        self.pods = {
            name: self._judged(dataclasses.replace(pod, containers_ready=ready))
            if only(pod) and pod.deadline is None
            else pod
            for name, pod in self.pods.items()
        }

    def settle(self, settings: Settings | None = None, rounds: int = 60) -> None:
        """Let everything that can happen happen, until several reconciliations on end have nothing to do."""
        quiet = 0
        for _ in range(rounds):
            quiet = 0 if self.reconcile(settings) else quiet + 1
            if quiet > 3:
                return
            self.run_controllers()
            self.end_pods()
            self.set_ready()
            self.now += 60.0
        raise AssertionError("no fixed point was reached")

    def sets(self) -> dict[str, Child]:
        return {child.name: child for child in self.observed().children if child.kind == "StatefulSet"}


@pytest.fixture(scope="session")
def make_pool() -> Callable[..., InferencePool]:
    """Build a pool from what differs."""
    return build_pool


@pytest.fixture(scope="session")
def model_cluster() -> type[ModelCluster]:
    """The model of the API server."""
    return ModelCluster
