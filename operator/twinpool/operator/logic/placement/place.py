"""The decision itself: which group goes where.

Groups that have a place keep it, whatever else would be better; the others are taken pool by pool in the order given,
each whole or not at all. Equal input gives equal output: nothing here is random and nothing looks at the clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.core.topology import Weights
from twinpool.operator.logic.placement.board import Board
from twinpool.operator.logic.placement.fill import insert
from twinpool.operator.logic.placement.model import Assignment
from twinpool.operator.logic.placement.shortage import shortfall
from twinpool.operator.logic.placement.tree import tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from twinpool.core.topology import Topology
    from twinpool.operator.logic.placement.model import Constraints, Gang, Node, Places


def place(
    groups: Sequence[Gang],
    nodes: Iterable[Node],
    placed: Places,
    topology: Topology,
    constraints: Mapping[str, Constraints],
    weights: Weights | None = None,
) -> Assignment:
    """Return where all of these groups go.

    Parameters
    ----------
    groups:
        Every group that is to have a place, also those that have one: a pool's groups count together.
    nodes:
        All nodes, with what others hold on them.
    placed:
        Where groups are already. They stay as long as their nodes exist, whatever the nodes' state: a cordon or an
        edited label affects new places only. Groups that are not among ``groups`` are ignored.
    constraints:
        What each pool wants, by pool.
    """
    board = Board(tree(topology, nodes), groups, constraints, weights or Weights())
    for gang in groups:
        at = placed.get(gang.name, ())
        if len(at) == gang.pods and all(node in board.tree.number for node in at):
            board.put(gang, tuple(board.tree.number[node] for node in at))
    short = {}
    for gang in groups:
        if gang.name not in board.places and not insert(board, gang):
            short[gang.name] = shortfall(board, gang)
    names = [node.name for node in board.tree.nodes]
    return Assignment({name: tuple(names[node] for node in at) for name, at in board.places.items()}, short)
