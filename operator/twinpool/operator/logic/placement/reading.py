"""From Kubernetes objects to what placement is asked: nodes, what pods hold on them, and what groups ask for.

Nothing here fails on a missing field, and a pod that cannot be read asks for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinpool.core.protocol import launcher_settings
from twinpool.operator.logic.placement.affinity import pinned, terms
from twinpool.operator.logic.placement.model import Constraints, Gang, Holder, Node, Taint, Tolerates
from twinpool.operator.logic.placement.quantity import amount

if TYPE_CHECKING:
    from twinpool.core.protocol import WorkerConfig
    from twinpool.core.spec import InferencePool

Body = Mapping[str, Any]


def asked(spec: Body) -> dict[str, int]:
    """Return what a pod asks for, as kube-scheduler counts it: containers together, or the largest init container.

    Init containers that stay (``restartPolicy: Always``) count with the containers. A pod counts as one of ``pods``.
    """
    staying: Counter[str] = Counter()
    first: Counter[str] = Counter()
    for container in spec.get("initContainers") or ():
        wants = _container(container)
        if container.get("restartPolicy") == "Always":
            staying.update(wants)
        else:
            first |= staying + Counter(wants)
    running = Counter(staying)
    for container in spec.get("containers") or ():
        running.update(_container(container))
    whole = (running | first) + Counter(_amounts(spec.get("overhead")))
    return {**whole, **_container(spec), "pods": 1}


def _container(container: Body) -> dict[str, int]:
    """Return the requests of a container (or of a whole pod); a limit without a request is one."""
    resources = container.get("resources") or {}
    return {**_amounts(resources.get("limits")), **_amounts(resources.get("requests"))}


def _amounts(given: Body | None) -> dict[str, int]:
    return {name: amount(name, value) for name, value in (given or {}).items()}


def gang(name: str, pool: str, role: str, template: Body) -> Gang:
    """Return what a group of this pod template asks for."""
    spec, config = template.get("spec") or {}, launcher_settings(template)
    amounts = asked(spec)
    pods = config.nodes if config else 1
    return Gang(
        name=name,
        pool=pool,
        role=role,
        pods=pods,
        unit=_unit(config) if config else 1,
        amounts=amounts,
        accelerator=accelerator(amounts, config.gpus if config else 0),
        selector=dict(spec.get("nodeSelector") or {}),
        terms=terms(spec.get("affinity")),
        tolerates=tuple(_tolerates(entry) for entry in spec.get("tolerations") or ()),
    )


def _unit(config: WorkerConfig) -> int:
    """Return the pods of one tensor-parallel unit; ranks are numbered unit by unit, and pods hold equally many."""
    ranks = config.tensor * config.pipeline * config.data // config.nodes
    return max(1, config.tensor // ranks) if ranks else 1


def accelerator(amounts: Mapping[str, int], count: int) -> str:
    """Return the resource that stands for GPUs: an extended one of which a pod asks for as many as it has GPUs.

    With the simulated engine, which has none, whatever is called a GPU.
    """
    extended = sorted(name for name in amounts if "/" in name)
    return next(
        (name for name in extended if name.endswith("/gpu")),
        next((name for name in extended if amounts[name] == count), ""),
    )


def _tolerates(entry: Body) -> Tolerates:
    return Tolerates(
        entry.get("key") or "", entry.get("operator") or "Equal", entry.get("value") or "", entry.get("effect") or ""
    )


def constraints(pool: InferencePool) -> Constraints:
    """Return what a pool wants of the network."""
    wants = pool.spec.placement
    if wants is None:
        return Constraints()
    return Constraints(
        tensor=wants.tensor.within,
        tensor_required=wants.tensor.required,
        expert=wants.expert.within,
        expert_required=wants.expert.required,
        pair=wants.pair.within,
        spread=wants.spread.across,
    )


def node(body: Body) -> Node:
    """Return a node, without what pods hold on it."""
    metadata, spec, status = body.get("metadata") or {}, body.get("spec") or {}, body.get("status") or {}
    ready = any(item["type"] == "Ready" and item["status"] == "True" for item in status.get("conditions") or ())
    return Node(
        name=metadata.get("name", ""),
        labels=dict(metadata.get("labels") or {}),
        allocatable=_amounts(status.get("allocatable")),
        taints=tuple(
            Taint(entry["key"], entry.get("value") or "", entry["effect"])
            for entry in spec.get("taints") or ()
            if entry["key"] != "node.kubernetes.io/unschedulable"
        ),
        ready=ready and not metadata.get("deletionTimestamp"),
        cordoned=bool(spec.get("unschedulable")),
    )


@dataclass(frozen=True, slots=True)
class Held:
    """What one pod holds, and where."""

    node: str
    uid: str
    holder: Holder


def held(body: Body) -> Held | None:
    """Return what a pod holds; None when it has no node or has ended. One that was sent to a node holds it too."""
    spec, metadata = body.get("spec") or {}, body.get("metadata") or {}
    where = spec.get("nodeName") or ("" if spec.get("schedulingGates") else pinned(spec))
    if not where or (body.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return None
    name = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
    return Held(where, metadata.get("uid", ""), Holder(name, asked(spec)))
