"""What is free and who is where, while the search tries things: kept up to date step by step, undone step by step.

The objective is that of :mod:`.score`, as running sums. Everything that the search asks for is found by walking a
node's domains, so that a step costs the same in a cluster of ten nodes and of ten thousand.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from twinpool.operator.logic.placement import score
from twinpool.operator.logic.placement.shape import Shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.core.topology import Weights
    from twinpool.operator.logic.placement.model import Constraints, Gang, Node, SlowLinks
    from twinpool.operator.logic.placement.tree import Tree


class Gpus:
    """One kind of GPU: how many each domain has, and how many are taken; over usable nodes."""

    def __init__(self, tree: Tree, weights: Weights, resource: str) -> None:
        size, free = score.gpus(tree, resource)
        self.counted = [count > 0 for count in size]
        self.size = [0] * len(tree.level)
        self.used = [0] * len(tree.level)
        #: What a free GPU costs in a domain that is partly used.
        self.weight = [weights.stranded.get(tree.topology.levels[level].name, 0.0) for level in tree.level]
        for index, chain in enumerate(tree.chain):
            for domain in chain:
                self.size[domain] += size[index]
                self.used[domain] += size[index] - free[index]
        #: GPUs of the largest domain of each level.
        self.most = [max((self.size[domain] for domain in domains), default=0) for domains in tree.at]

    def delta(self, domain: int, count: int) -> float:
        """Return what it costs to take ``count`` GPUs in a domain."""
        opened = 0 if self.used[domain] else self.size[domain]
        return self.weight[domain] * (opened - count)


class Pool:
    """The groups of one pool that have a place: how many of each role lie in each domain."""

    def __init__(self, gangs: list[Gang], wants: Constraints, tree: Tree, weights: Weights) -> None:
        self.wants = wants
        count = Counter(gang.role for gang in gangs)
        worth = {role: sum(gang.worth for gang in gangs if gang.role == role) for role in count}
        topology = tree.topology
        self._paired = paired = bool(count["prefill"] and count["decode"])
        self._tree = tree
        self._handoff = weights.handoff * sum(worth.values()) if paired else 0.0
        self._pair = weights.pair * sum(worth.values()) if paired else 0.0
        self._near = topology.index(wants.pair)
        self._apart = topology.index(wants.spread)
        self._farthest = topology.price(0) - topology.price(topology.host)
        #: What two groups of a role in one failure domain cost.
        self.crowding = {role: weights.spread * worth[role] / count[role] ** 2 for role in count}
        self.share = {role: 1 / count[role] for role in count}
        self.where: dict[str, dict[int, int]] = {role: {} for role in ("prefill", "decode", *count)}
        self.spans = 0.0

    @property
    def touched(self) -> set[int]:
        """Return the domains in which the pool has something."""
        return set().union(*self.where.values())

    def delta(self, domain: int, role: str) -> float:
        """Return what one more group of a role changes in a domain, beyond what it changes in an untouched one."""
        mine = self.where[role].get(domain, 0)
        change = 2 * mine * self.crowding[role] if self._tree.covers[self._apart][domain] else 0.0
        if self._paired and role in ("prefill", "decode"):
            other = "decode" if role == "prefill" else "prefill"
            theirs = self.where[other].get(domain, 0) * self.share[other]
            change -= self._worth(domain) * min(self.share[role], max(0.0, theirs - mine * self.share[role]))
        return change

    def _worth(self, domain: int) -> float:
        """Return what it is worth to keep the pool's KV inside a domain."""
        near = self._pair if self._tree.covers[self._near][domain] else 0.0
        return self._handoff * self._tree.gain[domain] + near

    def cost(self) -> float:
        """Return the pool's terms of the objective."""
        made, taken = self.where["prefill"], self.where["decode"]
        total = self.spans
        if self._paired:
            for domain, count in made.items():
                kept = min(count * self.share["prefill"], taken.get(domain, 0) * self.share["decode"])
                whole = kept * (self._handoff * self._farthest + self._pair) if domain == 0 else 0.0
                total += whole - kept * self._worth(domain)
        for role, counts in self.where.items():
            pairs = sum(n * (n - 1) for domain, n in counts.items() if self._tree.covers[self._apart][domain])
            total += self.crowding.get(role, 0.0) * pairs
        return total


class Board:
    """The nodes, what is free on them, and where each group lies."""

    def __init__(
        self,
        tree: Tree,
        gangs: Iterable[Gang],
        constraints: Mapping[str, Constraints],
        weights: Weights,
        slow: SlowLinks = frozenset(),
    ) -> None:
        self.tree = tree
        self.slow = frozenset(link for link in slow if all(name in tree.number for name in link))
        #: Nodes that the slow links of each node lead to, by number; itself for the links between its own GPUs.
        self.wary: dict[int, set[int]] = {}
        for link in self.slow:
            ends = [tree.number[name] for name in link]
            for end in ends:
                self.wary.setdefault(end, set()).update(other for other in ends if other != end or len(ends) == 1)
        self.weights = weights
        self.gangs = {gang.name: gang for gang in gangs}
        members: dict[str, list[Gang]] = {}
        for gang in self.gangs.values():
            members.setdefault(gang.pool, []).append(gang)
        self.pools = {name: Pool(found, constraints[name], tree, weights) for name, found in members.items()}
        self.free: dict[str, list[int]] = {}
        for resource in sorted({name for gang in self.gangs.values() for name in gang.amounts}):
            self.free[resource] = [_free(node, resource) for node in tree.nodes]
        kinds = sorted({gang.accelerator for gang in self.gangs.values() if gang.accelerator})
        self.gpus = {resource: Gpus(tree, weights, resource) for resource in kinds}
        self.places: dict[str, tuple[int, ...]] = {}
        self.stranding = 0.0
        #: Every node whose free amounts changed, in order; shapes read on from where they were.
        self.log: list[int] = []
        self._shapes: dict[object, Shape] = {}
        self._shape_of: dict[str, Shape] = {}

    def shape(self, gang: Gang) -> Shape:
        """Return what groups that ask for the same see of the nodes, up to date."""
        found = self._shape_of.get(gang.name)
        if found is None:
            asked = tuple(sorted(gang.amounts.items())), gang.accelerator
            where = tuple(sorted(gang.selector.items())), gang.terms, gang.tolerates
            found = self._shapes.get((asked, where))
            if found is None:
                found = self._shapes[asked, where] = Shape(self, gang)
            self._shape_of[gang.name] = found
        found.refresh()
        return found

    def take(self, gang: Gang, node: int, sign: int = 1) -> None:
        """Give one pod of a group its amounts on a node, or take them back (``sign`` -1)."""
        for resource, amount in gang.amounts.items():
            self.free[resource][node] -= sign * amount
        kind = self.gpus.get(gang.accelerator)
        if kind is not None and kind.counted[node]:
            count = sign * gang.gpus
            for domain in self.tree.chain[node]:
                before = kind.size[domain] - kind.used[domain] if kind.used[domain] else 0
                kind.used[domain] += count
                after = kind.size[domain] - kind.used[domain] if kind.used[domain] else 0
                self.stranding += kind.weight[domain] * (after - before)
        self.log.append(node)

    def put(self, gang: Gang, nodes: tuple[int, ...]) -> None:
        """Give a group its place."""
        for node in nodes:
            self.take(gang, node)
        self.settle(gang, nodes)

    def settle(self, gang: Gang, nodes: tuple[int, ...], sign: int = 1) -> None:
        """Count a group whose pods have taken their amounts as being there, or no more (``sign`` -1)."""
        pool = self.pools[gang.pool]
        counts = pool.where[gang.role]
        for domain in self.tree.around[self.tree.common(nodes)]:
            counts[domain] = counts.get(domain, 0) + sign
            if not counts[domain]:
                del counts[domain]
        if gang.pods > 1 or self.slow:
            pool.spans += sign * self.spanning(gang, nodes)
        if sign > 0:
            self.places[gang.name] = nodes
        else:
            del self.places[gang.name]

    def drop(self, gang: Gang) -> tuple[int, ...]:
        """Take a group's place away and return it."""
        nodes = self.places[gang.name]
        self.settle(gang, nodes, -1)
        for node in nodes:
            self.take(gang, node, -1)
        return nodes

    def spanning(self, gang: Gang, nodes: tuple[int, ...]) -> float:
        """Return what it costs a group to lie on these nodes together."""
        names = tuple(self.tree.nodes[node].name for node in nodes)
        apart = score.spanning(gang, names, self.tree, self.pools[gang.pool].wants, self.weights)
        return sum(apart) + score.slowed(gang, names, self.slow, self.weights)

    def cost(self, pool: str) -> float:
        """Return the objective without the other pools' terms: only differences of it mean anything."""
        return self.stranding + self.pools[pool].cost()


def _free(node: Node, resource: str) -> int:
    """Return what a node has left beside other people's pods; below 0 when it was promised twice."""
    return node.allocatable.get(resource, 0) - sum(holder.amounts.get(resource, 0) for holder in node.holders)
