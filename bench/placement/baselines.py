"""What others do, each rule in a few lines: our reading of what is published, not the products themselves."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from bench.placement.cases import GPU
from twinpool.operator.logic.placement.tree import Tree, tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from random import Random

    from bench.placement.cases import Case
    from twinpool.operator.logic.placement.model import Gang

Placed = dict[str, tuple[str, ...]]


class Ground:
    """Free GPUs by node, and the domains; what every rule works on."""

    def __init__(self, case: Case, random: Random) -> None:
        self.case, self.random = case, random
        self.tree: Tree = tree(case.topology, case.nodes)
        self.free = [
            node.allocatable[GPU] - sum(holder.amounts.get(GPU, 0) for holder in node.holders)
            for node in self.tree.nodes
        ]
        self.size = [node.allocatable[GPU] for node in self.tree.nodes]
        #: Groups that lie on each node.
        self.groups: list[set[str]] = [set() for _ in self.tree.nodes]

    def put(self, gang: Gang, order: Iterable[int]) -> tuple[str, ...] | None:
        """Take the first nodes of an order with room for each pod; take nothing and return None when they do not do."""
        taken: list[int] = []
        for node in order:
            while len(taken) < gang.pods and self.free[node] >= gang.gpus:
                self.free[node] -= gang.gpus
                taken.append(node)
        if len(taken) < gang.pods:
            for node in taken:
                self.free[node] += gang.gpus
            return None
        for node in taken:
            self.groups[node].add(gang.name)
        return tuple(self.tree.nodes[node].name for node in taken)


def _each(ground: Ground, order: Callable[[Gang], Iterable[int]]) -> Placed:
    placed = {gang.name: ground.put(gang, order(gang)) for gang in ground.case.groups}
    return {name: nodes for name, nodes in placed.items() if nodes is not None}


def anywhere(ground: Ground) -> Placed:
    """Place every pod on a random node with room."""
    nodes = list(range(len(ground.free)))

    def order(_: Gang) -> list[int]:
        ground.random.shuffle(nodes)
        return nodes

    return _each(ground, order)


def spread(ground: Ground) -> Placed:
    """Place every pod on the node with most free GPUs, as kube-scheduler's LeastAllocated does; ties at random."""

    def order(_: Gang) -> list[int]:
        return sorted(range(len(ground.free)), key=lambda node: (-ground.free[node], ground.random.random()))

    return _each(ground, order)


def pack(ground: Ground) -> Placed:
    """Place every pod on the node with fewest free GPUs, as kube-scheduler's MostAllocated does; ties at random."""

    def order(_: Gang) -> list[int]:
        return sorted(range(len(ground.free)), key=lambda node: (ground.free[node], ground.random.random()))

    return _each(ground, order)


def switches(ground: Ground) -> Placed:
    """Place a whole pool in the smallest switch domain with room, the fullest first (after HeteroScale's groups)."""
    pools: dict[str, list[Gang]] = {}
    for gang in ground.case.groups:
        pools.setdefault(gang.pool, []).append(gang)
    result: Placed = {}
    for members in pools.values():
        for domain in _switches(ground, sum(gang.pods * gang.gpus for gang in members)):
            order = sorted(ground.tree.members(domain), key=lambda node: (ground.free[node], node))
            placed = {gang.name: ground.put(gang, order) for gang in members}
            if None not in placed.values():
                result.update({name: nodes for name, nodes in placed.items() if nodes})
                break
            for gang in members:
                for name in placed[gang.name] or ():
                    ground.free[ground.tree.number[name]] += gang.gpus
    return result


def _switches(ground: Ground, needed: int) -> Iterable[int]:
    topology = ground.tree.topology
    for level in range(topology.index("rack"), -1, -1):
        room = [(sum(ground.free[node] for node in ground.tree.members(at)), at) for at in ground.tree.at[level]]
        yield from (at for free, at in sorted(room) if free >= needed)


def exclusive(ground: Ground) -> Placed:
    """Place every group in a rack where no other group is, as LeaderWorkerSet's exclusive topology does."""
    racks = ground.tree.at[ground.tree.topology.index("rack")]
    taken: Counter[int] = Counter()
    result: Placed = {}
    for gang in ground.case.groups:
        able = [
            (-sum(ground.free[node] for node in members), at, members)
            for at in racks
            if not taken[at]
            for members in [ground.tree.members(at)]
            if sum(ground.free[node] // gang.gpus for node in members) >= gang.pods
        ]
        if not able:
            continue
        _, at, members = min(able)
        taken[at] += 1
        nodes = ground.put(gang, sorted(members, key=lambda node: (-ground.free[node], node)))
        if nodes is not None:
            result[gang.name] = nodes
    return result


RULES: dict[str, Callable[[Ground], Placed]] = {
    "random": anywhere,
    "spread": spread,
    "bin-pack": pack,
    "HeteroScale-like": switches,
    "LWS-like exclusive": exclusive,
}
