"""Whether some groups fit at all, whatever it costs: tried exhaustively, within a budget.

Best-fit packs well but can miss the one arrangement that holds everything; a shortfall is only said when this search
has found none either. Nodes that cannot be told apart are tried once, and a state that led nowhere is not tried again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.operator.logic.placement.eligible import eligible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twinpool.operator.logic.placement.board import Board
    from twinpool.operator.logic.placement.model import Gang

Found = dict[str, tuple[int, ...]]


class Budget:
    """States that may still be looked at; one budget serves a whole decision, so that it ends in bounded time."""

    def __init__(self, states: int) -> None:
        self.left = states

    def spend(self) -> bool:
        """Take one state, and return whether there was one."""
        self.left -= 1
        return self.left >= 0


def fit(board: Board, gangs: Sequence[Gang], budget: Budget) -> Found | None:
    """Return places for all these groups beside what is on the board, or None when there are none (or time is up).

    None of the groups may be on the board.
    """
    ordered = sorted(gangs, key=lambda gang: (-gang.pods, -gang.unit, -gang.gpus, gang.name))
    if any(board.shape(gang).slots[0] < gang.pods for gang in ordered):
        return None
    return _Search(board, ordered, budget).run()


class _Search:
    def __init__(self, board: Board, gangs: list[Gang], budget: Budget) -> None:
        self._tree, self._gangs, self._budget = board.tree, gangs, budget
        self._wants = [board.pools[gang.pool].wants for gang in gangs]
        self._open = [[eligible(node, gang) for node in board.tree.nodes] for gang in gangs]
        self._resources = sorted({name for gang in gangs for name in gang.amounts})
        self._free = [
            tuple(board.free[name][node] for name in self._resources) for node in range(len(board.tree.nodes))
        ]
        self._needs = [tuple(gang.amounts.get(name, 0) for name in self._resources) for gang in gangs]
        kinds: dict[object, int] = {}
        #: Nodes of one kind differ in their name and in what is free on them, in nothing else.
        self._kind = [
            kinds.setdefault((self._tree.chain[node][:-1], tuple(row[node] for row in self._open)), len(kinds))
            for node in range(len(self._tree.nodes))
        ]
        self._dead: set[object] = set()

    def run(self) -> Found | None:
        found: Found = {}
        return found if self._place(0, found) else None

    def _place(self, index: int, found: Found) -> bool:
        if index == len(self._gangs):
            return True
        state = index, tuple(sorted(zip(self._kind, self._free, strict=True)))
        if state in self._dead or not self._budget.spend():
            return False
        for nodes in self._options(index):
            found[self._gangs[index].name] = nodes
            if self._place(index + 1, found):
                return True
        self._dead.add(state)
        return False

    def _options(self, index: int) -> Iterator[tuple[int, ...]]:
        """Yield the places of a group; while one is looked at, its amounts are taken."""
        tree, wants, gang = self._tree, self._wants[index], self._gangs[index]
        level = tree.topology.index(wants.expert) if wants.expert_required and gang.pods > 1 else 0
        for container in tree.cover(level):
            yield from self._pods(index, container, [])

    def _pods(self, index: int, container: int, nodes: list[int]) -> Iterator[tuple[int, ...]]:
        gang = self._gangs[index]
        if len(nodes) == gang.pods:
            yield tuple(nodes)
            return
        seen: set[object] = set()
        for node in self._candidates(index, container, nodes):
            if (looks := (self._kind[node], self._free[node])) in seen:
                continue
            seen.add(looks)
            before, need = self._free[node], self._needs[index]
            if any(amount > have for amount, have in zip(need, before, strict=True)):
                continue
            self._free[node] = tuple(have - amount for amount, have in zip(need, before, strict=True))
            yield from self._pods(index, container, [*nodes, node])
            self._free[node] = before

    def _candidates(self, index: int, container: int, nodes: list[int]) -> Iterator[int]:
        """Yield the nodes for the next pod: pods of one unit are alike, so they go in the order of nodes."""
        tree, gang, wants = self._tree, self._gangs[index], self._wants[index]
        inside = len(nodes) % gang.unit
        first, around = 0, container
        if inside:
            first = nodes[-1]
            if wants.tensor_required:
                level = tree.topology.index(wants.tensor)
                around = next(at for at in tree.chain[nodes[-1]] if tree.covers[level][at])
        elif gang.unit == 1 and nodes:
            first = nodes[-1]
        for node in range(first, len(tree.nodes)):
            if self._open[index][node] and container in tree.chain[node] and around in tree.chain[node]:
                yield node
