"""Groups of several pods that only new nodes can hold: how their pods are shown to autoscalers without being torn.

Cluster Autoscaler and Karpenter do not look at gated pods, and pod affinity of a pod cannot be changed. So the pods of
such a group are made anew without the gate, with required pod affinity on the level that must hold the group, and kept
away from the nodes that are there. kube-scheduler refuses them and autoscalers see why; once nodes have come the group
is gated and pinned again, or is already whole.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.operator.logic.placement.eligible import selected, usable
from twinpool.operator.logic.placement.model import Growth, Match

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.operator.logic.placement.model import Constraints, Gang, Node
    from twinpool.operator.logic.placement.tree import Tree

Body = dict[str, Any]

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
#: Nodes that one pod's affinity names. Where more could hold a pod of the group none is named, and half a group that
#: lands on them is taken back after a while.
MOST_AVOIDED = 16


def growth(gang: Gang, wants: Constraints, domains: Tree) -> Growth | None:
    """Return how a group that only new nodes can hold is shown to autoscalers; None where it cannot be said to them.

    Several tensor-parallel units that span nodes would each need an affinity of their own, and pods of one StatefulSet
    have the same. A level that no node has a label for cannot be named.
    """
    levels = []
    if gang.unit > 1 and wants.tensor_required:
        if gang.unit < gang.pods:
            return None
        levels.append(domains.topology.index(wants.tensor))
    if wants.expert_required:
        levels.append(domains.topology.index(wants.expert))
    key = ""
    if levels:
        labels = domains.topology.levels[max(levels)].labels
        seen = Counter(label for node in domains.nodes for label in labels if label in node.labels)
        if not seen:
            return None
        key = min(seen, key=lambda label: (-seen[label], labels.index(label)))
    able = [node.name for node in domains.nodes if usable(node) and selected(node, gang) and _large(node, gang)]
    return Growth(key, tuple(able) if len(able) <= MOST_AVOIDED else ())


def _large(node: Node, gang: Gang) -> bool:
    return all(node.allocatable.get(resource, 0) >= amount for resource, amount in gang.amounts.items())


def affinity_for(affinity: Mapping[str, Any] | None, group: str, grown: Growth) -> Body:
    """Return a pod's own affinity with what growth adds: all of the group in one domain, none on nodes there are."""
    result = {key: dict(value) for key, value in (affinity or {}).items()}
    if grown.key:
        own = result.setdefault("podAffinity", {})
        term = {"labelSelector": {"matchLabels": {protocol.LABEL_GROUP: group}}, "topologyKey": grown.key}
        own[_REQUIRED] = [*(own.get(_REQUIRED) or ()), term]
    if grown.avoided:
        own = result.setdefault("nodeAffinity", {})
        away = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in grown.avoided]
        given = (own.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
        terms = [{**term, "matchFields": [*(term.get("matchFields") or ()), *away]} for term in given]
        own[_REQUIRED] = {"nodeSelectorTerms": terms}
    return result


def without(gang: Gang, grown: Growth) -> Gang:
    """Return what a group asks for apart from what growth added to its pods."""
    added = {Match("metadata.name", "NotIn", (name,), field=True) for name in grown.avoided}
    terms = tuple(tuple(match for match in term if match not in added) for term in gang.terms)
    return replace(gang, terms=tuple(term for term in terms if term))
