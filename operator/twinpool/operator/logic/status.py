"""The status of a pool, derived from its live children: a lost status loses transition times and nothing else."""

from __future__ import annotations

from collections import Counter
from math import gcd
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.operator.logic import measured_links, names, renderer_objects
from twinpool.operator.logic.conditions import Situation, Statement, statements, with_times
from twinpool.operator.logic.loading import loading
from twinpool.operator.logic.router_objects import endpoint
from twinpool.operator.logic.slow_links import remembered

if TYPE_CHECKING:
    from twinpool.core.spec import InferencePool

Status = dict[str, Any]


def status(situation: Situation, now: float) -> Status:
    """Return the whole status as the API server stores it."""
    pool = situation.observed.pool
    result: Status = {
        "observedGeneration": pool.metadata.generation,
        "conditions": with_times(_statements(situation), conditions_of(pool), pool.metadata.generation, now),
        "router": _router(situation),
        "revision": situation.revision,
        "endpoint": endpoint(pool),
        "selector": leaders(pool),
    }
    for role in names.roles(pool):
        result[role] = _role(situation, role)
    if pool.spec.prefill is not None:
        result["ratio"] = ratio(result["prefill"]["routable"], result["decode"]["routable"])
        result["targetRatio"] = ratio(result["prefill"]["desired"], result["decode"]["desired"])
    if serving := _serving_revision(situation):
        result["servingRevision"] = serving
    if slow := remembered(pool, situation.groups, now):
        result["slowLinks"] = slow
    if links := measured_links.remembered(pool, situation.groups, situation.topology, now):
        result["links"] = links
    if loads := loading(situation.observed, situation.live):
        result["loading"] = loads
    if situation.placement is not None:
        result["placement"] = situation.placement
    if situation.compute_domain is not None:
        result["computeDomain"] = situation.compute_domain
    objectives = pool.spec.objectives.model_dump(by_alias=True, exclude_none=True)
    if pool.spec.objectives.ttft or pool.spec.objectives.itl:
        result["objectives"] = objectives
    return result


def _statements(situation: Situation) -> list[Statement]:
    """Return what is said of the pool, and of its renderers, which it serves without."""
    rendering = renderer_objects.statement(situation.observed, situation.live, situation.revision)
    return [*statements(situation), *rendering]


def unreadable(pool_status: Status, generation: int, message: str, now: float) -> Status:
    """Return the status of a pool that cannot be parsed; the rest of what it said before stays."""
    found = Statement("Ready", "False", "InvalidSpec", f"the pool cannot be read: {message}")
    conditions = with_times([found], pool_status.get("conditions", ()), generation, now)
    return {**pool_status, "observedGeneration": generation, "conditions": conditions}


def conditions_of(pool: InferencePool) -> list[dict[str, Any]]:
    """Return the conditions that the pool carries."""
    return [item.model_dump(by_alias=True) for item in pool.status.conditions]


def ratio(prefill: int, decode: int) -> str:
    """Return prefill to decode groups in lowest terms."""
    factor = gcd(prefill, decode) or 1
    return f"{prefill // factor}:{decode // factor}"


def leaders(pool: InferencePool) -> str:
    """Return the label selector of the pods that stand for one decode group each."""
    labels = {**names.selector(pool, "decode"), protocol.LABEL_POD_INDEX: "0"}
    return ",".join(f"{key}={value}" for key, value in labels.items())


def _serving_revision(situation: Situation) -> str:
    """Return the revision of most ready decode groups, the newest one of equals; empty when none is ready."""
    ready = Counter(group.revision for group in situation.live if group.ready and group.role == "decode")
    return max(ready, key=lambda name: (ready[name], name == situation.revision, name), default="")


def _role(situation: Situation, role: str) -> Status:
    groups = [group for group in situation.live if group.role == role]
    routable = sum(group.ready for group in groups)
    desired = situation.wanted[role]
    return {
        "desired": desired,
        "created": len(groups),
        "ready": sum(group.loaded for group in groups),
        "routable": routable,
        "updated": sum(group.revision == situation.revision for group in groups),
        "summary": f"{routable}/{desired}",
    }


def _router(situation: Situation) -> Status:
    pods, desired = situation.routers, situation.observed.pool.spec.routing.replicas
    ready = sum(pod.ready for pod in pods)
    return {
        "desired": desired,
        "created": len(pods),
        "ready": ready,
        "routable": ready,
        "updated": len(pods),
        "summary": f"{ready}/{desired}",
    }
