"""Which groups would lie better elsewhere, by moves that each pay and each can be made while the group still serves.

A move is what the operator would do if the group were opened anew: its new place is the best one beside everything that
is there, its own old place included, which it gives back afterwards. So every step is a whole valid layout, and what is
foretold is what a replacement would get.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinpool.core.topology import Weights
from twinpool.operator.logic.placement.board import Board
from twinpool.operator.logic.placement.fill import best_place
from twinpool.operator.logic.placement.score import Score, score
from twinpool.operator.logic.placement.tree import tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from twinpool.core.topology import Topology
    from twinpool.operator.logic.placement.model import Constraints, Gang, Node, Places, SlowLinks
    from twinpool.operator.logic.placement.tree import Tree

#: What a move must win at least, for each GPU of the group, in GPUs that are worth nothing: a group that moves loads
#: its weights and fills its cache anew.
LEAST = 0.05
#: Moves of one proposal.
MOST = 16


@dataclass(frozen=True, slots=True)
class Move:
    """A group that would go elsewhere, and the whole objective before and after."""

    gang: str
    role: str
    here: tuple[str, ...]
    there: tuple[str, ...]
    before: Score
    after: Score

    @property
    def wins(self) -> float:
        """Return how much the objective falls."""
        return self.before.total - self.after.total


@dataclass(frozen=True, slots=True)
class Question:
    """A layout whose groups may move: ``groups`` are those that have a place, ``nodes`` hold what others have."""

    groups: Sequence[Gang]
    nodes: Iterable[Node]
    topology: Topology
    constraints: Mapping[str, Constraints]
    slow: SlowLinks = frozenset()
    weights: Weights = field(default_factory=Weights)


def defragment(question: Question, placed: Places, least: float = LEAST) -> list[Move]:
    """Return the moves to make, one after another; each wins at least ``least`` for each GPU of its group."""
    domains = tree(question.topology, question.nodes)
    where = {gang.name: placed[gang.name] for gang in question.groups if _there(gang, placed, domains)}
    found: list[Move] = []
    moved: set[str] = set()
    while len(found) < MOST:
        best: tuple[float, Move] | None = None
        for gang in question.groups:
            move = _move(question, domains, where, gang) if gang.name in where and gang.name not in moved else None
            if move is not None and move.wins >= least * gang.worth:
                best = max(best or (0.0, move), (move.wins / gang.worth, move), key=lambda item: item[0])
        if best is None:
            break
        move = best[1]
        found.append(move)
        moved.add(move.gang)
        where[move.gang] = move.there
    return found


def _there(gang: Gang, placed: Places, domains: Tree) -> bool:
    at = placed.get(gang.name, ())
    return len(at) == gang.pods and all(node in domains.number for node in at)


def _move(question: Question, domains: Tree, where: Mapping[str, tuple[str, ...]], gang: Gang) -> Move | None:
    """Return where a group would go if it were opened anew now; None when there is no room beside itself."""
    board = Board(domains, question.groups, question.constraints, question.weights, question.slow)
    for other in question.groups:
        if other.name in where:
            board.put(other, tuple(domains.number[node] for node in where[other.name]))
    # It still holds what it has, and counts no more as one of its pool.
    board.settle(gang, board.places[gang.name], -1)
    nodes = best_place(board, gang)
    if nodes is None:
        return None
    there = tuple(domains.nodes[node].name for node in nodes)
    before, after = (
        score(question.groups, places, domains, question.constraints, question.weights, question.slow)
        for places in (where, {**where, gang.name: there})
    )
    return Move(gang.name, gang.role, where[gang.name], there, before, after)
