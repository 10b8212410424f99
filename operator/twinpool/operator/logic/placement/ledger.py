"""One decision for all pools of the cluster: what every group holds, has been promised, or still needs.

The ledger is rebuilt from the pods each time: a pod that is bound, or handed to kube-scheduler for one node, holds it.
The only thing remembered is what was promised to pods that are still gated, and losing that costs nothing but another
decision. So two pools never get the same GPU, and a leader that starts anew goes on where the pods are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.operator.logic.placement import reading
from twinpool.operator.logic.placement.growth import growth, without
from twinpool.operator.logic.placement.model import Assignment, Gang, Growth, Holder, Match, Node, Verdict
from twinpool.operator.logic.placement.place import place
from twinpool.operator.logic.placement.tree import Tree, tree

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from twinpool.core.spec import InferencePool
    from twinpool.core.topology import Topology
    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import PodView
    from twinpool.operator.logic.placement.model import SlowLinks
    from twinpool.operator.logic.placement.reading import Held


@dataclass(frozen=True, slots=True)
class Promise:
    """The nodes of a group that was decided about, and the pods that it was decided for."""

    nodes: tuple[str, ...]
    pods: frozenset[str]


@dataclass(frozen=True, slots=True)
class Claim:
    """A group whose nodes the operator chooses."""

    pool: InferencePool
    group: Group

    @property
    def name(self) -> str:
        """Return the group's name in the whole cluster."""
        return f"{self.pool.metadata.namespace}/{self.group.name}"

    @property
    def pods(self) -> list[PodView]:
        """Return the pods that are to stay."""
        return [pod for pod in self.group.pods if pod.deadline is None]

    @property
    def fixed(self) -> dict[int, str]:
        """Return the nodes of the ranks that have one for good: bound to it, or allowed on no other."""
        return {pod.rank: pod.node or pod.pinned for pod in self.pods if pod.node or pod.pinned}

    @property
    def waits(self) -> bool:
        """Return whether a pod of the group waits for us, or was shown to autoscalers and has no node yet."""
        return any(
            protocol.PLACEMENT_GATE in pod.scheduling_gates or (self.group.grows and not pod.node and not pod.pinned)
            for pod in self.pods
        )


@dataclass(frozen=True, slots=True)
class Ledger:
    """What was decided, and what is promised from now on, by group."""

    verdicts: Mapping[str, Verdict]
    promises: Mapping[str, Promise]
    complaints: tuple[str, ...] = ()


def decide(
    claims: Sequence[Claim],
    promises: Mapping[str, Promise],
    nodes: Iterable[Node],
    pods: Iterable[Held],
    topology: Topology,
    slow: SlowLinks = frozenset(),
) -> Ledger:
    """Return the nodes of every group that waits; ``nodes`` and ``pods`` are all of the cluster."""
    ordered = sorted(claims, key=_age)
    ours = {pod.uid for claim in ordered for pod in claim.pods if pod.node or pod.pinned}
    seen = with_holders(nodes, pods, ours)
    domains = tree(topology, seen)
    groups: list[Gang] = []
    placed: dict[str, tuple[str, ...]] = {}
    for claim in ordered:
        pieces, there = _pieces(claim, promises.get(claim.name), domains)
        groups += pieces
        placed.update(there)
    wants = {_pool(claim): reading.constraints(claim.pool) for claim in ordered}
    answer = place(groups, seen, placed, topology, wants, slow=slow)
    verdicts = {claim.name: _verdict(claim, groups, answer, domains) for claim in ordered if claim.waits}
    kept = {
        claim.name: Promise(verdicts[claim.name].nodes, verdicts[claim.name].pods)
        for claim in ordered
        if claim.waits and verdicts[claim.name].nodes
    }
    told = tuple(f"node {item.node} {item.problem}: not used at level {item.level}" for item in domains.complaints)
    return Ledger(verdicts, kept, told)


def with_holders(nodes: Iterable[Node], pods: Iterable[Held], ours: Collection[str]) -> list[Node]:
    """Return the nodes with what all pods hold on them but ``ours`` (uids), which are counted by group."""
    holders: dict[str, list[Holder]] = {}
    for pod in pods:
        if pod.uid not in ours:
            holders.setdefault(pod.node, []).append(pod.holder)
    return [replace(node, holders=tuple(holders.get(node.name, ()))) for node in nodes]


def _age(claim: Claim) -> tuple[float, str, int]:
    """Who was there first is served first."""
    return claim.group.child.created or 0.0, _pool(claim), claim.group.serial


def _pool(claim: Claim) -> str:
    return f"{claim.pool.metadata.namespace}/{claim.pool.metadata.name}"


def whole(claim: Claim) -> Gang:
    """Return what the whole group asks for."""
    template = claim.group.child.content.get("spec", {}).get("template", {})
    gang = reading.gang(claim.name, _pool(claim), claim.group.role, template)
    return without(gang, Growth.read(claim.group.grows)) if claim.group.grows else gang


def _pieces(claim: Claim, promise: Promise | None, domains: Tree) -> tuple[list[Gang], dict[str, tuple[str, ...]]]:
    """Return what to ask for a group: all of it, or what it lacks beside the ranks that stay where they are."""
    gang, fixed = whole(claim), claim.fixed
    if len(fixed) == gang.pods and all(node in domains.number for node in fixed.values()):
        return [gang], {gang.name: tuple(fixed[rank] for rank in range(gang.pods))}
    if promise and _holds(claim, promise, fixed):
        return [gang], {gang.name: promise.nodes}
    if not fixed:
        return ([gang] if claim.waits else []), {}
    return _missing(claim, gang, fixed, domains)


def _holds(claim: Claim, promise: Promise, fixed: Mapping[int, str]) -> bool:
    """Return whether a promise is still about these pods; new ones under the old names get a new decision."""
    alive = promise.pods.intersection(pod.uid for pod in claim.pods)
    return bool(alive) and all(promise.nodes[rank] == node for rank, node in fixed.items())


def _missing(
    claim: Claim, gang: Gang, fixed: Mapping[int, str], domains: Tree
) -> tuple[list[Gang], dict[str, tuple[str, ...]]]:
    """Return a piece for the ranks that stay, and one for the lacking ranks of each unit, near those that stay."""
    there = tuple(node for _, node in sorted(fixed.items()) if node in domains.number)
    staying = replace(gang, name=f"{gang.name}#", pods=len(there), unit=1)
    pieces, placed = ([staying], {staying.name: there}) if there else ([], {})
    level = domains.topology.index(reading.constraints(claim.pool).tensor)
    hard = reading.constraints(claim.pool).tensor_required and gang.unit > 1
    for ranks in _lacking(gang, fixed):
        start = ranks[0] // gang.unit * gang.unit
        beside = [fixed[rank] for rank in range(start, start + gang.unit) if rank in fixed]
        near = _near(beside, level, domains) if hard and beside else None
        terms = gang.terms if near is None else tuple((*term, near) for term in gang.terms or ((),))
        unit = len(ranks) if gang.unit > 1 else 1
        pieces.append(replace(gang, name=f"{gang.name}#{ranks[0]}", pods=len(ranks), unit=unit, terms=terms))
    return pieces, placed


def _lacking(gang: Gang, fixed: Mapping[int, str]) -> list[list[int]]:
    """Return the ranks without a node, unit by unit."""
    found = [
        [rank for rank in range(start, start + gang.unit) if rank not in fixed]
        for start in range(0, gang.pods, gang.unit)
    ]
    return [ranks for ranks in found if ranks]


def _near(beside: Sequence[str], level: int, domains: Tree) -> Match:
    """Return the requirement of a node in the domain where the rest of a unit is; nodes that are gone tell nothing."""
    known = [domains.number[name] for name in beside if name in domains.number]
    inside = next((at for at in domains.chain[known[0]] if domains.covers[level][at]), 0) if known else 0
    names = tuple(domains.nodes[node].name for node in domains.members(inside))
    return Match("metadata.name", "In", names, field=True)


def _verdict(claim: Claim, groups: Iterable[Gang], answer: Assignment, domains: Tree) -> Verdict:
    """Return what the pieces of a group come to: nodes for all ranks, or the first shortage."""
    pieces = [gang for gang in groups if gang.name.partition("#")[0] == claim.name]
    pods = frozenset(pod.uid for pod in claim.pods)
    short = next((answer.short[gang.name] for gang in pieces if gang.name in answer.short), None)
    gang, fixed = whole(claim), claim.fixed
    if short is not None:
        new = short.in_vain and gang.pods > 1
        grown = growth(gang, reading.constraints(claim.pool), domains) if new else None
        return Verdict(short=replace(short, gang=claim.name), pods=pods, growth=grown)
    if len(pieces) == 1 and pieces[0].name == claim.name:
        return Verdict(answer.places[claim.name], pods=pods)
    nodes = dict(fixed)
    for ranks in _lacking(gang, fixed):
        nodes.update(zip(ranks, answer.places[f"{claim.name}#{ranks[0]}"], strict=True))
    return Verdict(tuple(nodes[rank] for rank in range(gang.pods)), pods=pods)
