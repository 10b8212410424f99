"""How the pods of a group get nodes: gated until all of them have one, then handed over, taken back when that fails.

Decided when a group is made and noted on its StatefulSet: an edit of the pool changes groups that come, not those that
are there. No group holds GPUs for long without being whole: pods that kube-scheduler does not bind where they were sent
are deleted with the rest of their group, come back gated, and the group is decided about anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.placement import Placement
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import HandOver, TakeBack
from twinpool.operator.logic.compute_domain import claiming
from twinpool.operator.logic.merge import merge
from twinpool.operator.logic.placement.affinity import ungating, wishes, with_wishes
from twinpool.operator.logic.placement.growth import affinity_for
from twinpool.operator.logic.placement.model import Growth, Verdict
from twinpool.operator.logic.pods import nodes_of
from twinpool.operator.logic.ratio import wanted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.core.placement import Mode
    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Observed, PodView
    from twinpool.operator.logic.placement.model import Shortfall
    from twinpool.operator.logic.pods import Template
    from twinpool.operator.logic.settings import Settings

#: Seconds from a pod's creation after which its node counts as lost to another workload when kube-scheduler says no: a
#: quarter of the time that its group has tried by then, within these bounds. What is refused for good is rarely tried.
RACE_AFTER, RACE_AT_MOST = 10.0, 60.0
#: Seconds for which pods of a group keep their nodes while another one of it finds none.
HALF_AFTER = 60.0


def mode(pool: InferencePool, templates: Iterable[Template], settings: Settings) -> Mode | None:
    """Return how pods of these templates get their nodes now; None leaves them to kube-scheduler."""
    wants = pool.spec.placement
    if wants is None:
        return None
    specs = [template["spec"] for template in templates]
    # Another scheduler may place by rules of its own, and devices of resource claims are in no node's numbers.
    foreign = any(spec.get("schedulerName") or spec.get("resourceClaims") for spec in specs)
    return "affinity" if wants.mode == "affinity" or foreign or not settings.sees_nodes else "pin"


def noted(group: Group) -> Mode | None:
    """Return how a group's pods get their nodes, as was decided when it was made."""
    known = group.child.annotation(names.PLACEMENT_ANNOTATION)
    return "pin" if known == "pin" else "affinity" if known == "affinity" else None


def placing(
    pool: InferencePool,
    role: str,
    template: Template,
    name: str,
    chosen: Mode | None,
    settings: Settings,
    grows: str = "",
    *,
    domain: bool = False,
) -> dict[str, Any]:
    """Return what a group's StatefulSet gets so that its pods find their nodes: annotations, and parts of the spec.

    ``grows`` is what :func:`growing` says of the group, ``domain`` whether its pods claim a ComputeDomain's channel.
    """
    found = _finding(pool, role, template, name, chosen, settings, grows)
    return merge(found, claiming(name)) if domain else found


def _finding(
    pool: InferencePool, role: str, template: Template, name: str, chosen: Mode | None, settings: Settings, grows: str
) -> dict[str, Any]:
    if chosen is None:
        return {"annotations": {}, "spec": {}}
    spec: dict[str, Any] = {}
    if chosen == "pin" and grows:
        spec["affinity"] = affinity_for(template["spec"].get("affinity"), name, Growth.read(grows))
        return {"annotations": {names.PLACEMENT_ANNOTATION: chosen, names.GROWTH_ANNOTATION: grows}, "spec": spec}
    if chosen == "pin":
        spec["schedulingGates"] = [{"name": protocol.PLACEMENT_GATE}]
    else:
        labels = {**names.selector(pool, role), protocol.LABEL_GROUP: name}
        added = wishes(labels, nodes_of(template), pool.spec.placement or Placement(), settings.topology)
        spec["affinity"] = with_wishes(template["spec"].get("affinity"), added)
    return {"annotations": {names.PLACEMENT_ANNOTATION: chosen}, "spec": spec}


def handed_over(observed: Observed, groups: Iterable[Group], settings: Settings) -> list[HandOver]:
    """Return the gated pods that have a node, and those that wait for nothing that we could give."""
    result = []
    for group in groups:
        verdict = observed.verdicts.get(group.name)
        for pod in group.pods:
            if pod.deadline is None and protocol.PLACEMENT_GATE in pod.scheduling_gates:
                node = _node(pod, group, verdict, settings)
                if node is not None:
                    patch = ungating(pod.uid, pod.scheduling_gates, pod.affinity or {}, node)
                    result.append(HandOver(pod.name, pod.uid, node, patch))
    return result


def _node(pod: PodView, group: Group, verdict: Verdict | None, settings: Settings) -> str | None:
    """Return the node of a gated pod, empty for any node, None when it has to wait.

    Without a view of the nodes waiting is pointless. And what no node here could ever hold is shown to kube-scheduler,
    because autoscalers add nodes for pods that it refuses; a group of several pods, which it would tear, is made anew
    for that (:func:`growing`).
    """
    if not settings.sees_nodes:
        return ""
    if verdict is None or pod.uid not in verdict.pods:
        return None
    if verdict.nodes:
        return verdict.nodes[pod.rank]
    return "" if verdict.short and verdict.short.in_vain and group.size == 1 else None


def growing(group: Group, verdict: Verdict | None, settings: Settings) -> str:
    """Return how a group's pods are to be shown to autoscalers, empty when they are not.

    Nothing changes while nothing is decided, and a whole group needs nothing any more.
    """
    if not settings.sees_nodes or sum(bool(pod.node) for pod in _staying(group)) >= group.size:
        return ""
    if verdict is None:
        return group.grows
    if verdict.growth is None:
        return ""
    # Nodes that came and do not suffice are no reason to make the pods anew once more.
    noted_growth = Growth.read(group.grows) if group.grows else None
    return group.grows if noted_growth and noted_growth.key == verdict.growth.key else str(verdict.growth)


def remade(observed: Observed, groups: Iterable[Group], settings: Settings) -> list[TakeBack]:
    """Return the pods without a node that are gated where their StatefulSet now shows them to autoscalers, or not so.

    Pod affinity of a pod cannot be changed. A StatefulSet that is about to change is waited for.
    """
    result = []
    for group in claimed(groups):
        settled = growing(group, observed.verdicts.get(group.name), settings) == group.grows
        if not settings.sees_nodes or not settled or group.size == 1:
            continue
        for pod in _staying(group):
            if not pod.node and not pod.pinned and _gated(pod) == bool(group.grows):
                why = "only new nodes can hold its group" if group.grows else "nodes can be chosen for its group now"
                result.append(TakeBack(pod.name, pod.uid, f"{pod.name} is made anew: {why}"))
    return result


def taken_back(observed: Observed, groups: Iterable[Group], now: float) -> list[TakeBack]:
    """Return the pods to delete so that their group can be placed anew, as a whole unless it serves already."""
    return [
        action
        for group in claimed(groups)
        for action in (_lost_races(group, now) or _halves(group, observed.verdicts, now))
    ]


def _lost_races(group: Group, now: float) -> list[TakeBack]:
    lost = [pod for pod in _racing(group) if now >= _race_ends(group, pod, now)]
    if not lost:
        return []
    serving = any(pod.containers_ready for pod in group.pods)
    others = [] if serving else [pod for pod in _staying(group) if pod not in lost and not _gated(pod)]
    reason = f"kube-scheduler did not bind {lost[0].name} to {lost[0].pinned}: {lost[0].scheduler_message}"
    return [TakeBack(pod.name, pod.uid, reason) for pod in (*lost, *others)]


def _race_ends(group: Group, pod: PodView, now: float) -> float:
    made = now if pod.created is None else pod.created
    tried = made - (made if group.child.created is None else group.child.created)
    return made + min(RACE_AT_MOST, max(RACE_AFTER, tried / 4))


def _halves(group: Group, verdicts: Mapping[str, Verdict], now: float) -> list[TakeBack]:
    waiting = _short(group, verdicts)
    if not waiting or now - max(pod.created or now for pod in waiting) < HALF_AFTER:
        return []
    reason = f"{waiting[0].name} finds no node beside the rest of its group"
    return [TakeBack(pod.name, pod.uid, reason) for pod in _staying(group) if not _gated(pod)]


def _racing(group: Group) -> list[PodView]:
    """Return the pods that were sent to a node and that kube-scheduler does not bind there."""
    return [pod for pod in _staying(group) if pod.pinned and not pod.node and pod.unschedulable]


def _short(group: Group, verdicts: Mapping[str, Verdict]) -> list[PodView]:
    """Return the pods of a group that found no node beside those that have one."""
    pods = _staying(group)
    waiting = [pod for pod in pods if _waits(pod, group)]
    return [] if verdicts.get(group.name, _NONE).short is None or len(waiting) == len(pods) else waiting


def _staying(group: Group) -> list[PodView]:
    return [pod for pod in group.pods if pod.deadline is None]


def _waits(pod: PodView, group: Group) -> bool:
    return _gated(pod) or (bool(group.grows) and not pod.node and not pod.pinned)


def _gated(pod: PodView) -> bool:
    return protocol.PLACEMENT_GATE in pod.scheduling_gates


def ends(observed: Observed, groups: Iterable[Group]) -> list[float]:
    """Return when pods that wait now will have waited too long, in seconds since 1970."""
    result = []
    for group in claimed(groups):
        result += [_race_ends(group, pod, pod.created) for pod in _racing(group) if pod.created]
        result += [pod.created + HALF_AFTER for pod in _short(group, observed.verdicts) if pod.created]
    return result


def claimed(groups: Iterable[Group]) -> list[Group]:
    """Return the groups whose nodes are the operator's to choose."""
    return [group for group in groups if noted(group) == "pin" and not group.retired and group.replicas > 0]


def coming(observed: Observed, groups: Iterable[Group]) -> bool:
    """Return whether more pods are about to be made that are best decided about together with those that wait."""
    there = [group for group in groups if not group.retired]
    partly = any(len(_staying(group)) < group.size for group in claimed(there))
    return partly or len(there) < sum(wanted(observed.pool).values())


def undecided(observed: Observed, groups: Iterable[Group]) -> bool:
    """Return whether a gated pod waits for a decision that has not been made for it."""
    return any(
        _waits(pod, group) and pod.uid not in observed.verdicts.get(group.name, _NONE).pods
        for group in claimed(groups)
        for pod in _staying(group)
    )


_NONE = Verdict()


def shortages(observed: Observed, groups: Iterable[Group]) -> list[Shortfall]:
    """Return why gated groups have no nodes yet."""
    found = [observed.verdicts[group.name].short for group in claimed(groups) if group.name in observed.verdicts]
    return [short for short in found if short is not None]
