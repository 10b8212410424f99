"""What the operator saw, trimmed to what planning needs: the caches of thousands of pods stay small.

The functions here read objects as the API server sends them. Nothing in them fails on a missing field: an object in
the middle of its creation has few.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.operator.logic.placement.affinity import pinned

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.autoscaler import Scaled
    from twinpool.operator.logic.books import Reports
    from twinpool.operator.logic.contest import Contest
    from twinpool.operator.logic.interconnect import Preflight
    from twinpool.operator.logic.loading import Weights
    from twinpool.operator.logic.placement.model import Verdict
    from twinpool.operator.logic.restarts import Life

Body = Mapping[str, Any]


def seconds(timestamp: str | None) -> float | None:
    """Return the seconds since 1970 of a Kubernetes timestamp, or None for None."""
    return None if timestamp is None else datetime.fromisoformat(timestamp).timestamp()


def timestamp(now: float) -> str:
    """Return the Kubernetes timestamp of ``now``, in whole seconds."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Termination:
    """How a container's process ended."""

    reason: str
    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class ContainerView:
    """One container of a pod."""

    name: str
    image: str
    ready: bool = False
    restarts: int = 0
    waiting_reason: str = ""
    waiting_message: str = ""
    terminated: Termination | None = None
    last_terminated: Termination | None = None


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod of a pool."""

    name: str
    role: str
    group: str = ""
    revision: str = ""
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    ready: bool = False
    #: When the pod became ready, in seconds since 1970; None while it is not.
    ready_since: float | None = None
    #: When the pod's grace period ends, in seconds since 1970; None while nobody asked it to go.
    deadline: float | None = None
    #: True or False once the scheduler said so, None before.
    scheduled: bool | None = None
    scheduler_message: str = ""
    containers: tuple[ContainerView, ...] = ()
    uid: str = ""
    address: str = ""
    node: str = ""
    #: The pod's ordinal in its group; rank 0 leads.
    rank: int = 0
    #: The leader as the pod was told, as JSON.
    leader: str = ""
    #: Where it is in the network, as routers were told, as JSON.
    place: str = ""
    containers_ready: bool = False
    #: Whether the pod waits for the gate that routers open, and whether it is open.
    gated: bool = False
    routable: bool = False
    #: Whether routers were told to send it nothing new.
    draining: bool = False
    #: Whether the gate was open once, so that requests may have come.
    has_served: bool = False
    #: When it was made, in seconds since 1970.
    created: float | None = None
    #: Names of its scheduling gates; while there are any, kube-scheduler does not look at it.
    scheduling_gates: tuple[str, ...] = ()
    #: Its affinity while it is gated, for a node is added to it.
    affinity: Body | None = None
    #: The only node that its node affinity allows, empty when there are several.
    pinned: str = ""
    #: Whether kube-scheduler found no node for it and waits for no preempted pod to go.
    unschedulable: bool = False


@dataclass(frozen=True, slots=True)
class Child:
    """An object that belongs to a pool. ``content`` is the object without server-side metadata and status."""

    kind: str
    name: str
    uid: str
    resource_version: str
    content: Body
    deleting: bool = False
    #: Pods that a StatefulSet's controller counts; 0 for other kinds.
    pods: int = 0
    #: Whether the object's own controller has seen the newest spec.
    seen: bool = True
    #: Digest of the wanted content that gave exactly this content when it was last applied: the API server rewrites
    #: some values (``1024Mi`` becomes ``1Gi``), which is no drift.
    settled: str | None = None
    #: Who else wrote it last, besides its status.
    writer: str = ""
    #: Why its controller cannot make pods, in the controller's words.
    complaint: str = ""
    #: When it was made, in seconds since 1970.
    created: float | None = None

    def annotation(self, key: str) -> str | None:
        """Return an annotation's value."""
        value: str | None = self.content["metadata"]["annotations"].get(key)
        return value

    def label(self, key: str) -> str:
        """Return a label's value, empty when there is none."""
        value: str = self.content["metadata"]["labels"].get(key, "")
        return value


@dataclass(frozen=True, slots=True)
class Refusal:
    """A write that the API server refused when this pool was last reconciled."""

    kind: str
    name: str
    message: str


@dataclass(frozen=True, slots=True)
class Observed:
    """A pool and everything that belongs to it."""

    pool: InferencePool
    children: tuple[Child, ...] = ()
    pods: tuple[PodView, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    #: Children that are left to another writer for now.
    contests: tuple[Contest, ...] = ()
    #: Highest number of a group that this process has ever seen: the views of two kinds may disagree.
    last_serial: int = 0
    #: What the routers said; None while they are not asked or have not been heard yet.
    reports: Reports | None = None
    #: What the launchers of leaders that restart their engines said, by uid of the pod.
    lives: Mapping[str, Life] = field(default_factory=dict)
    #: What the launchers of leaders said of their groups' preflights, by uid of the pod.
    preflights: Mapping[str, Preflight] = field(default_factory=dict)
    #: What the launchers of starting pods said of their weights, by uid of the pod.
    weights: Mapping[str, Weights] = field(default_factory=dict)
    #: Labels of the nodes whose links were measured, by node.
    node_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    #: Revision and role of sets that the API server took in a dry run; None: nobody can ask it.
    tried: frozenset[tuple[str, str]] | None = None
    #: What was decided about the numbers of groups; None for a pool without ``scaling``, and where nobody decides.
    scaling: Scaled | None = None
    #: What was decided about the nodes of its groups, by group.
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)


def pool_key(body: Body) -> tuple[str, str] | None:
    """Return namespace and name of the pool that a child or pod belongs to, or None for strangers.

    The owner counts more than the label, which a hand edit may have taken away; pods have another owner.
    """
    metadata = body.get("metadata") or {}
    pool = (metadata.get("labels") or {}).get(protocol.LABEL_POOL)
    for owner in metadata.get("ownerReferences") or ():
        if owner["kind"] == protocol.KIND and owner["apiVersion"].startswith(f"{protocol.GROUP}/"):
            pool = owner["name"]
    return (metadata.get("namespace") or "", pool) if pool else None


def read_child(kind: str, body: Body) -> Child:
    """Trim a child to what planning needs."""
    metadata = body["metadata"]
    status = body.get("status") or {}
    rest = {key: value for key, value in body.items() if key not in ("metadata", "status", "apiVersion", "kind")}
    content: dict[str, Any] = _shared(rest)
    content["metadata"] = {
        "labels": dict(metadata.get("labels") or {}),
        "annotations": dict(metadata.get("annotations") or {}),
        "ownerReferences": list(metadata.get("ownerReferences") or ()),
    }
    return Child(
        kind=kind,
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        resource_version=metadata.get("resourceVersion", ""),
        content=content,
        deleting=metadata.get("deletionTimestamp") is not None,
        pods=status.get("replicas", 0),
        seen=status.get("observedGeneration", 0) >= metadata.get("generation", 0),
        writer=_other_writer(metadata.get("managedFields") or ()),
        complaint=_replica_failure(status.get("conditions") or ()),
        created=seconds(metadata.get("creationTimestamp")),
    )


def _shared(value: Any) -> Any:
    """Return a copy that shares its words with other objects, and keeps nothing of a large answer that was parsed."""
    if isinstance(value, str):
        return sys.intern(value)
    if isinstance(value, Mapping):
        return {sys.intern(key): _shared(inner) for key, inner in value.items()}
    return [_shared(inner) for inner in value] if isinstance(value, list) else value


def _other_writer(entries: Iterable[Body]) -> str:
    """Return who wrote an object last besides us and its own controller, as the API server recorded it."""
    others = [
        entry
        for entry in entries
        if not entry.get("manager", "").startswith("twinpool/") and entry.get("subresource") != "status"
    ]
    newest = max(others, key=lambda entry: str(entry.get("time", "")), default={})
    via = f" (subresource {newest['subresource']})" if newest.get("subresource") else ""
    return f"{newest.get('manager', '')}{via}"


def _replica_failure(conditions: Iterable[Body]) -> str:
    for item in conditions:
        if item["type"] == "ReplicaFailure" and item["status"] == "True":
            return str(item.get("message", ""))
    return ""


def read_pod(body: Body) -> PodView:
    """Trim a pod to what planning needs."""
    metadata, status = body["metadata"], body.get("status") or {}
    labels, spec = metadata.get("labels") or {}, body.get("spec") or {}
    conditions = {item["type"]: item for item in status.get("conditions") or ()}
    placed, ready = conditions.get("PodScheduled"), conditions.get("Ready", {})
    gates = tuple(gate.get("name", "") for gate in spec.get("schedulingGates") or ())
    # What stands there about gates stays for a moment after they are gone.
    waits = bool(gates) or (placed or {}).get("reason") == "SchedulingGated"
    reports = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    return PodView(
        name=metadata["name"],
        role=labels.get(protocol.LABEL_ROLE, ""),
        group=labels.get(protocol.LABEL_GROUP, ""),
        revision=labels.get(protocol.LABEL_REVISION, ""),
        phase=status.get("phase", "Pending"),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        ready=_true(conditions, "Ready"),
        ready_since=seconds(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None,
        deadline=seconds(metadata.get("deletionTimestamp")),
        scheduled=None if placed is None or waits else placed["status"] == "True",
        scheduler_message="" if placed is None or waits else placed.get("message", ""),
        containers=tuple(_read_container(report) for report in reports),
        uid=metadata.get("uid", ""),
        address=status.get("podIP", ""),
        node=spec.get("nodeName", ""),
        rank=int(index) if (index := labels.get(protocol.LABEL_POD_INDEX, "")).isdecimal() else 0,
        leader=(metadata.get("annotations") or {}).get(protocol.ANNOTATION_LEADER, ""),
        place=(metadata.get("annotations") or {}).get(protocol.ANNOTATION_PLACE, ""),
        containers_ready=_true(conditions, "ContainersReady"),
        gated=any(gate.get("conditionType") == protocol.ROUTABLE_GATE for gate in spec.get("readinessGates") or ()),
        routable=_true(conditions, protocol.ROUTABLE_GATE),
        draining=protocol.ANNOTATION_DRAINING in (metadata.get("annotations") or {}),
        has_served=protocol.ROUTABLE_GATE in conditions,
        created=seconds(metadata.get("creationTimestamp")),
        scheduling_gates=gates,
        affinity=(spec.get("affinity") or {}) if gates else None,
        pinned="" if gates else pinned(spec),
        unschedulable=not status.get("nominatedNodeName") and (placed or {}).get("reason") == "Unschedulable",
    )


def _true(conditions: Mapping[str, Body], kind: str) -> bool:
    return conditions.get(kind, {}).get("status") == "True"


def _read_container(report: Body) -> ContainerView:
    waiting = report.get("state", {}).get("waiting") or {}
    return ContainerView(
        name=report["name"],
        image=report.get("image", ""),
        ready=report.get("ready", False),
        restarts=report.get("restartCount", 0),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        terminated=_read_termination(report.get("state", {}).get("terminated")),
        last_terminated=_read_termination(report.get("lastState", {}).get("terminated")),
    )


def _read_termination(report: Body | None) -> Termination | None:
    if report is None:
        return None
    return Termination(report.get("reason", ""), report.get("exitCode", 0), report.get("message", ""))
