"""The domains of the nodes as a tree: made once for a set of nodes, never changed.

Domains and nodes are numbered so that sums over them are lists. Number 0 is the cluster; a node is the leaf of its own
path. Nodes are numbered by their names in natural order, so that equal input gives equal numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.core.topology import Complaint, Path, Topology, paths

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twinpool.operator.logic.placement.model import Node


@dataclass(frozen=True, slots=True)
class Tree:
    """Domains by number: ``chain`` is all domains of a node from the cluster to its leaf."""

    topology: Topology
    nodes: tuple[Node, ...]
    number: dict[str, int]
    #: Level of each domain.
    level: list[int]
    #: Name of each domain, and the domain around it (-1 for the cluster).
    name: list[str]
    parent: list[int]
    children: list[list[int]]
    #: Leaf of each node, node of each leaf (-1 for other domains), and the domains from the cluster to each node.
    leaf: list[int]
    node: list[int]
    chain: list[tuple[int, ...]]
    #: Domains of each level.
    at: list[list[int]]
    #: Each domain and those around it, the cluster first.
    around: list[tuple[int, ...]]
    #: How much cheaper a byte is inside each domain than in the one around it.
    gain: list[float]
    #: For each level, whether a domain stands for it: it is of it, or the first narrower one where that is missing.
    covers: list[list[bool]]
    complaints: tuple[Complaint, ...]

    def common(self, nodes: Sequence[int]) -> int:
        """Return the narrowest domain that holds all these nodes."""
        if len(nodes) == 1:
            return self.leaf[nodes[0]]
        shared = 0
        for row in zip(*(self.chain[node] for node in set(nodes)), strict=False):
            if row.count(row[0]) < len(row):
                break
            shared = row[0]
        return shared

    def cover(self, level: int) -> list[int]:
        """Return the domains of a level, and for nodes that lie in none the next narrower one."""
        return [domain for domain, covers in enumerate(self.covers[level]) if covers]

    def members(self, domain: int) -> list[int]:
        """Return the nodes of a domain."""
        if self.node[domain] >= 0:
            return [self.node[domain]]
        return [node for child in self.children[domain] for node in self.members(child)]


_DIGITS = re.compile(r"(\d+)")


def natural(name: str) -> tuple[tuple[str | int, ...], str]:
    """Return a key that sorts ``node-10`` after ``node-9``; names that differ have different keys."""
    return tuple(int(part) if index % 2 else part for index, part in enumerate(_DIGITS.split(name))), name


def tree(topology: Topology, nodes: Iterable[Node]) -> Tree:
    """Return the tree of these nodes."""
    ordered = tuple(sorted(nodes, key=lambda node: natural(node.name)))
    found, complaints = paths(topology, {node.name: node.labels for node in ordered})
    made = Tree(
        topology=topology,
        nodes=ordered,
        number={node.name: index for index, node in enumerate(ordered)},
        level=[0],
        name=["cluster"],
        parent=[-1],
        children=[[]],
        leaf=[],
        node=[-1],
        chain=[],
        around=[(0,)],
        gain=[],
        covers=[],
        at=[[0], *([] for _ in topology.levels[1:])],
        complaints=tuple(complaints),
    )
    prices = [topology.price(level) for level in range(len(topology.levels))]
    known: dict[tuple[int, int, str], int] = {}
    for index, node in enumerate(ordered):
        _add(made, known, index, found[node.name])
    # Level of what is around each domain; nothing is around the cluster.
    outer = [-1, *(made.level[parent] for parent in made.parent[1:])]
    made.gain.extend([0.0, *(prices[o] - prices[i] for o, i in zip(outer[1:], made.level[1:], strict=True))])
    for at in range(len(topology.levels)):
        made.covers.append([o < at <= i for o, i in zip(outer, made.level, strict=True)])
    return made


def _add(made: Tree, known: dict[tuple[int, int, str], int], index: int, path: Path) -> None:
    domain = 0
    for level, name in enumerate(path[1:], 1):
        if name is None:
            continue
        key = (domain, level, name)
        if key not in known:
            known[key] = len(made.level)
            _new_domain(made, domain, level, name)
        domain = known[key]
    made.node[domain] = index
    made.leaf.append(domain)
    made.chain.append(made.around[domain])


def _new_domain(made: Tree, parent: int, level: int, name: str) -> None:
    number = len(made.level)
    made.level.append(level)
    made.name.append(name)
    made.parent.append(parent)
    made.children.append([])
    made.node.append(-1)
    made.around.append((*made.around[parent], number))
    made.children[parent].append(number)
    made.at[level].append(number)
