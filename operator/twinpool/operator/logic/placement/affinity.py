"""Node affinity of pods: what it requires, how a node is added to it, and how pods are told what should be near.

A gated pod's node affinity may only be narrowed: a node goes into every required term, or becomes the only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.operator.logic.placement.model import Match

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.core.placement import Placement
    from twinpool.core.topology import Topology

Body = Mapping[str, Any]

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
#: How much kube-scheduler is told to value each wish, of 100: ranks of a group, prefill beside decode, groups apart.
_TOGETHER, _PAIR, _APART = 100, 50, 20


def terms(affinity: Body | None) -> tuple[tuple[Match, ...], ...]:
    """Return the required terms of a pod's node affinity."""
    required = ((affinity or {}).get("nodeAffinity") or {}).get(_REQUIRED) or {}
    return tuple(_term(term) for term in required.get("nodeSelectorTerms") or ())


def _term(term: Body) -> tuple[Match, ...]:
    return tuple(
        Match(entry["key"], entry["operator"], tuple(entry.get("values") or ()), field=field)
        for key, field in (("matchExpressions", False), ("matchFields", True))
        for entry in term.get(key) or ()
    )


def pinned(spec: Body) -> str:
    """Return the only node that a pod's required node affinity allows, empty when it allows several."""
    found = set()
    for term in terms(spec.get("affinity")):
        nodes = [match.values for match in term if match.field and match.operator == "In" and len(match.values) == 1]
        found.add(nodes[-1][0] if nodes else "")
    return found.pop() if len(found) == 1 else ""


def narrowing(affinity: Body, node: str) -> list[dict[str, Any]]:
    """Return the JSON patch that makes ``node`` the only one that a pod's affinity allows."""
    only = {"key": "metadata.name", "operator": "In", "values": [node]}
    required = {"nodeSelectorTerms": [{"matchFields": [only]}]}
    path = "/spec/affinity"
    if not affinity:
        return [_add(path, {"nodeAffinity": {_REQUIRED: required}})]
    path += "/nodeAffinity"
    if not affinity.get("nodeAffinity"):
        return [_add(path, {_REQUIRED: required})]
    path += f"/{_REQUIRED}"
    given = affinity["nodeAffinity"].get(_REQUIRED) or {}
    if not given.get("nodeSelectorTerms"):
        return [_add(path, required)]
    return [
        _add(f"{path}/nodeSelectorTerms/{index}/matchFields{'/-' if term.get('matchFields') else ''}", entry)
        for index, term in enumerate(given["nodeSelectorTerms"])
        for entry in [only if term.get("matchFields") else [only]]
    ]


def _add(path: str, value: Any) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def ungating(uid: str, gates: Sequence[str], affinity: Body, node: str) -> tuple[dict[str, Any], ...]:
    """Return the JSON patch that hands a pod to kube-scheduler, for one node or, when it is empty, for any.

    It fails on another pod of that name, and on one that somebody else has handed over meanwhile.
    """
    index = gates.index(protocol.PLACEMENT_GATE)
    gate = f"/spec/schedulingGates/{index}"
    return (
        {"op": "test", "path": "/metadata/uid", "value": uid},
        {"op": "test", "path": f"{gate}/name", "value": protocol.PLACEMENT_GATE},
        *(narrowing(affinity, node) if node else ()),
        {"op": "remove", "path": gate},
    )


def wishes(labels: Mapping[str, str], pods: int, wants: Placement, topology: Topology) -> dict[str, Any]:
    """Return the affinity that tells kube-scheduler what a pool wants of the network; none of it is required.

    ``labels`` are those of the pod. A level that nodes carry under several labels is wished for under each.
    """
    pool = {key: labels[key] for key in (protocol.LABEL_POOL,)}
    role = {**pool, protocol.LABEL_ROLE: labels[protocol.LABEL_ROLE]}
    near = _terms(_PAIR, pool, topology, wants.pair.within)
    if pods > 1:
        group = {protocol.LABEL_GROUP: labels[protocol.LABEL_GROUP]}
        near = [*_terms(_TOGETHER, group, topology, wants.tensor.within), *near]
    apart = _terms(_APART, role, topology, wants.spread.across)
    return {"podAffinity": {_PREFERRED: near}, "podAntiAffinity": {_PREFERRED: apart}}


def _terms(weight: int, labels: Mapping[str, str], topology: Topology, level: str) -> list[dict[str, Any]]:
    keys = topology.levels[topology.index(level)].labels or ("kubernetes.io/hostname",)
    return [
        {"weight": weight, "podAffinityTerm": {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": key}}
        for key in keys
    ]


def with_wishes(affinity: Body | None, added: Body) -> dict[str, Any]:
    """Return a user's affinity with wishes after the user's own; both kinds of lists are kept whole."""
    result = {key: dict(value) for key, value in (affinity or {}).items()}
    for kind, preferred in added.items():
        own = result.setdefault(kind, {})
        own[_PREFERRED] = [*(own.get(_PREFERRED) or ()), *preferred[_PREFERRED]]
    return result
