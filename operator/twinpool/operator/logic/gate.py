"""The gate ``serving.twinpool.dev/routable``: a worker counts as Ready once every router would send it requests.

Without it a rollout would take the last old group away between a new pod's readiness and the moment when the routers
have seen it. Rules that always hold:

* it opens when every Ready router lists the group's leader as admitted, for all ranks at once;
* it closes only when the group is on its way out or one of its pods fails, never because a router came, went, or
  thinks badly of a worker: a router that restarts must not take a pool's readiness with it;
* a pool that asked for no routers (``routing.replicas: 0``) has nobody to wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.operator.logic import books
from twinpool.operator.logic.actions import SetGate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Observed, PodView


def gates(observed: Observed, groups: Iterable[Group]) -> list[SetGate]:
    """Return the gates that must open or close."""
    return [action for group in groups for action in _of_group(observed, group)]


def waits(group: Group) -> bool:
    """Return whether a group could serve but for its gate."""
    return not group.retired and _problem(group) == "" and any(_shut(pod) for pod in group.pods)


def pending(observed: Observed, groups: Iterable[Group]) -> str:
    """Return what the first group that waits for its gate waits for, empty when none does."""
    for group in groups:
        leader = group.leader
        missing = _missing(observed, leader) if waits(group) and leader and not leader.routable else ""
        if missing:
            return f"group {group.name} waits for the routers: {missing}"
    return ""


def _of_group(observed: Observed, group: Group) -> list[SetGate]:
    here = [pod for pod in group.pods if pod.gated and pod.deadline is None]
    problem = "the group is on its way out" if group.retired else _problem(group)
    if problem:
        reason = "Draining" if group.retired else "GroupFailed"
        return [SetGate(pod.name, pod.uid, False, reason, problem) for pod in here if pod.routable]
    leader = group.leader
    if leader is None or not any(_shut(pod) for pod in here):
        return []
    if not leader.routable and _missing(observed, leader):
        return []
    if observed.pool.spec.routing.replicas == 0:
        reason, message = "NoRouters", "routing.replicas is 0: there is no router to wait for"
    else:
        reason, message = "Listed", "every router lists the group"
    return [SetGate(pod.name, pod.uid, True, reason, message) for pod in here if _shut(pod)]


def _shut(pod: PodView) -> bool:
    return pod.gated and not pod.routable


def _problem(group: Group) -> str:
    """Return what keeps the group from serving, empty when nothing does."""
    for pod in group.pods:
        if pod.deadline is not None:
            return f"pod {pod.name} is being deleted"
        if not pod.containers_ready:
            return f"the containers of pod {pod.name} are not ready"
    missing = group.size - len(group.pods)
    return f"{missing} of {group.size} pods do not exist" if missing > 0 else ""


def _missing(observed: Observed, leader: PodView) -> str:
    """Return why the gate cannot open yet, empty when it can."""
    if observed.pool.spec.routing.replicas == 0:
        return ""
    asked = books.serving_routers(observed.pods)
    if not asked:
        return "no router pod is ready"
    if observed.reports is None:
        return "the routers are being asked"
    for router in asked:
        entry = books.entry(observed.reports.get(router.name), leader.uid)
        if entry is None:
            where = f"{router.address}:{protocol.ROUTER_ADMIN_PORT}"
            return f"router pod {router.name} does not answer the operator at {where}; let network policies allow it"
        if not entry.admitted:
            return f"router pod {router.name} has not admitted {leader.name} yet"
    return ""
