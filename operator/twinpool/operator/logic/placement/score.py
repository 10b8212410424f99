"""How good a placement is: one weighted sum, in GPUs that are worth nothing. ``docs/placement.md`` derives it.

This is the definition; the search keeps the same sum up to date as it goes, and a test compares the two.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.core.topology import Weights
    from twinpool.operator.logic.placement.model import Constraints, Gang, Places, SlowLinks
    from twinpool.operator.logic.placement.tree import Tree


@dataclass(frozen=True, slots=True)
class Score:
    """The terms of the objective, each weighted; less is better."""

    handoff: float = 0.0
    pair: float = 0.0
    tensor: float = 0.0
    span: float = 0.0
    slow: float = 0.0
    spread: float = 0.0
    stranded: float = 0.0

    @property
    def total(self) -> float:
        """Return the objective."""
        return self.handoff + self.pair + self.tensor + self.span + self.slow + self.spread + self.stranded

    def __add__(self, other: Score) -> Score:
        """Return the sum term by term."""
        return Score(
            self.handoff + other.handoff,
            self.pair + other.pair,
            self.tensor + other.tensor,
            self.span + other.span,
            self.slow + other.slow,
            self.spread + other.spread,
            self.stranded + other.stranded,
        )


def score(
    gangs: Iterable[Gang],
    places: Places,
    tree: Tree,
    constraints: Mapping[str, Constraints],
    weights: Weights,
    slow: SlowLinks = frozenset(),
) -> Score:
    """Return the score of these groups at these places; a group without a place costs nothing itself."""
    pools: dict[str, list[Gang]] = {}
    for gang in gangs:
        pools.setdefault(gang.pool, []).append(gang)
    every = [gang for members in pools.values() for gang in members]
    total = Score(stranded=stranded(tree, places, every, weights))
    for pool, members in pools.items():
        total += of_pool(members, places, tree, constraints[pool], weights)
    met = sum(slowed(gang, places[gang.name], slow, weights) for gang in every if gang.name in places)
    return total + Score(slow=met)


def of_pool(members: list[Gang], places: Places, tree: Tree, wants: Constraints, weights: Weights) -> Score:
    """Return the terms of one pool, all but stranding."""
    worth = sum(gang.worth for gang in members)
    kept = kept_shares(members, places, tree)
    topology, whole = tree.topology, kept.get(0, 0.0)
    gained = sum(tree.gain[domain] * share for domain, share in kept.items())
    near = topology.index(wants.pair)
    spans = [spanning(gang, places[gang.name], tree, wants, weights) for gang in members if gang.name in places]
    return Score(
        handoff=weights.handoff * worth * (whole * (topology.price(0) - topology.price(topology.host)) - gained),
        pair=weights.pair * worth * (whole - sum(share for at, share in kept.items() if tree.covers[near][at])),
        tensor=sum(tensor for tensor, _ in spans),
        span=sum(span for _, span in spans),
        spread=weights.spread * _spread(members, places, tree, wants),
    )


def kept_shares(members: list[Gang], places: Places, tree: Tree) -> dict[int, float]:
    """Return the share of the pool's KV that can stay inside each domain; that of the cluster is all that can be made.

    Each prefill group makes an equal share of the KV and each decode group takes one. In a tree of domains the pairing
    with least traffic is plain: of what a domain makes it keeps what it can take. Empty for a pool of one role.
    """
    makers = sum(gang.role == "prefill" for gang in members)
    takers = sum(gang.role == "decode" for gang in members)
    made: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    for gang in members:
        if gang.name in places:
            counts = made if gang.role == "prefill" else taken
            counts.update(tree.around[location(places[gang.name], tree)])
    return {domain: min(made[domain] / makers, taken[domain] / takers) for domain in made if takers}


def location(nodes: tuple[str, ...], tree: Tree) -> int:
    """Return the narrowest domain that holds the whole group."""
    return tree.common([tree.number[node] for node in nodes])


def units(gang: Gang, nodes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the nodes of each tensor-parallel unit."""
    return [nodes[start : start + gang.unit] for start in range(0, gang.pods, gang.unit)]


def spanning(
    gang: Gang, nodes: tuple[str, ...], tree: Tree, wants: Constraints, weights: Weights
) -> tuple[float, float]:
    """Return what a group pays for tensor units, and for itself, that lie on several nodes."""
    topology = tree.topology
    tensor = span = 0.0
    if gang.unit > 1:
        levels = [tree.level[tree.common([tree.number[node] for node in unit])] for unit in units(gang, nodes)]
        share = gang.worth * gang.unit / gang.pods
        tensor = sum(weights.tensor * share * topology.price(level) for level in levels)
    if gang.pods > 1:
        level = tree.level[location(nodes, tree)]
        outside = weights.outside if level < topology.index(wants.expert) else 0.0
        span = gang.worth * (weights.span * topology.price(level) + outside)
    return tensor, span


def slowed(gang: Gang, nodes: tuple[str, ...], slow: SlowLinks, weights: Weights) -> float:
    """Return what a group pays when its ranks meet over a link that was measured too slow."""
    inside = [frozenset((node,)) for node in nodes if gang.gpus > 1]
    pairs = [frozenset(pair) for pair in combinations(nodes, 2)] if slow else []
    return weights.slow * gang.worth if not slow.isdisjoint([*inside, *pairs]) else 0.0


def _spread(members: list[Gang], places: Places, tree: Tree, wants: Constraints) -> float:
    """Return the GPUs of each role that are expected to go with the domain of one of its groups, above the least."""
    level, total = tree.topology.index(wants.spread), 0.0
    for role in sorted({gang.role for gang in members}):
        groups = [gang for gang in members if gang.role == role]
        located = [location(places[gang.name], tree) for gang in groups if gang.name in places]
        counts = Counter(at for domain in located for at in tree.around[domain] if tree.covers[level][at])
        pairs = sum(count * (count - 1) for count in counts.values())
        total += sum(gang.worth for gang in groups) * pairs / len(groups) ** 2
    return total


def stranded(tree: Tree, places: Places, gangs: list[Gang], weights: Weights) -> float:
    """Return the weighted free GPUs of domains that are partly used, over usable nodes and all kinds of GPU."""
    taken: dict[str, Counter[int]] = {gang.accelerator: Counter() for gang in gangs if gang.accelerator}
    for gang in gangs:
        for node in places.get(gang.name, ()):
            if gang.accelerator:
                taken[gang.accelerator][tree.number[node]] += gang.gpus
    total = 0.0
    for resource, counts in taken.items():
        size, free = gpus(tree, resource)
        left: Counter[int] = Counter()
        whole: Counter[int] = Counter()
        for index, chain in enumerate(tree.chain):
            for domain in chain:
                whole[domain] += size[index]
                left[domain] += free[index] - (counts[index] if size[index] else 0)
        for domain, rest in left.items():
            if rest < whole[domain]:
                total += rest * weights.stranded.get(tree.topology.levels[tree.level[domain]].name, 0.0)
    return total


def gpus(tree: Tree, resource: str) -> tuple[list[int], list[int]]:
    """Return how many GPUs each node has, and how many are free of others; none where no new pod may go."""
    size, free = [], []
    for node in tree.nodes:
        have = node.allocatable.get(resource, 0) if node.ready and not node.cordoned else 0
        size.append(have)
        free.append(max(0, have - sum(holder.amounts.get(resource, 0) for holder in node.holders)) if have else 0)
    return size, free
