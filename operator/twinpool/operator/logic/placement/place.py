"""The decision itself: which group goes where.

Groups that have a place keep it, whatever else would be better; the others are taken pool by pool in the order given,
each whole or not at all. Equal input gives equal output: nothing here is random and nothing looks at the clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.core.topology import Weights
from twinpool.operator.logic.placement.board import Board
from twinpool.operator.logic.placement.fill import insert
from twinpool.operator.logic.placement.improve import EFFORT, arrange, improve
from twinpool.operator.logic.placement.model import Assignment
from twinpool.operator.logic.placement.search import Budget, fit
from twinpool.operator.logic.placement.shortage import shortfall
from twinpool.operator.logic.placement.tree import tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from twinpool.core.topology import Topology
    from twinpool.operator.logic.placement.model import Constraints, Gang, Node, Places, Shortfall, SlowLinks

#: States that the search for a missing place may look at in one decision.
SEARCHED = 20_000


def place(
    groups: Sequence[Gang],
    nodes: Iterable[Node],
    placed: Places,
    topology: Topology,
    constraints: Mapping[str, Constraints],
    weights: Weights | None = None,
    *,
    effort: int = EFFORT,
    slow: SlowLinks = frozenset(),
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
    effort:
        How much is tried to make a small decision better; it changes where groups go, never whether they have a place.
    slow:
        Links that were measured too slow. No group lies across one as long as another place costs less than that.
    """
    board = Board(tree(topology, nodes), groups, constraints, weights or Weights(), slow)
    for gang in groups:
        at = placed.get(gang.name, ())
        if len(at) == gang.pods and all(node in board.tree.number for node in at):
            board.put(gang, tuple(board.tree.number[node] for node in at))
    new = [gang for gang in groups if gang.name not in board.places]
    short = _accept(board, new)
    improve(board, [gang for gang in new if gang.name in board.places], effort)
    names = [node.name for node in board.tree.nodes]
    return Assignment({name: tuple(names[node] for node in at) for name, at in board.places.items()}, short)


def _accept(board: Board, new: Sequence[Gang]) -> dict[str, Shortfall]:
    """Put down every group for which there is room beside those before it, and return the others' shortages."""
    pools: dict[str, list[Gang]] = {}
    for gang in new:
        pools.setdefault(gang.pool, []).append(gang)
    budget, short = Budget(SEARCHED), {}
    accepted: list[Gang] = []
    for members in pools.values():
        if arrange(board, members):
            accepted += members
            continue
        for gang in members:
            if insert(board, gang) or _squeeze(board, accepted, gang, budget):
                accepted.append(gang)
            else:
                short[gang.name] = shortfall(board, gang)
    return short


def _squeeze(board: Board, accepted: Sequence[Gang], gang: Gang, budget: Budget) -> bool:
    """Look for any arrangement of the new groups that also holds this one; return whether there is one."""
    before = {other.name: board.drop(other) for other in accepted}
    found = fit(board, [*accepted, gang], budget)
    for other in accepted:
        board.put(other, (found or before)[other.name])
    if found is not None:
        board.put(gang, found[gang.name])
    return found is not None
