"""What groups that ask for the same see of the nodes: how many of their pods fit where, and where one fits best.

Read lazily from the board's log, so that what nobody asks for costs nothing.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from twinpool.operator.logic.placement.eligible import eligible

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.operator.logic.placement.board import Board
    from twinpool.operator.logic.placement.model import Gang

#: Two costs closer than this are equal: sums in another order differ by rounding.
EPSILON = 1e-9


class Shape:
    """Room for pods of one kind.

    ``slots`` is how many of them each domain holds; ``best`` is the least that stranding changes by when one more goes
    somewhere into a domain, counted from that domain inwards, infinite when none fits.
    """

    def __init__(self, board: Board, gang: Gang) -> None:
        self._board = board
        self._tree = board.tree
        self._need = [(board.free[resource], amount) for resource, amount in gang.amounts.items() if amount]
        self._gpus = gang.gpus
        self._kind = board.gpus.get(gang.accelerator)
        self.eligible = [eligible(node, gang) for node in board.tree.nodes]
        self.slots = [0] * len(self._tree.level)
        self.best = [inf] * len(self._tree.level)
        self._read = len(board.log)
        for index, chain in enumerate(self._tree.chain):
            if count := self._count(index):
                for domain in chain:
                    self.slots[domain] += count
        # Domains are numbered from the outside in.
        for domain in range(len(self._tree.level) - 1, -1, -1):
            self.best[domain] = self._best(domain)

    def refresh(self) -> None:
        """Catch up with what changed on the board."""
        log = self._board.log
        if self._read == len(log):
            return
        changed = set(log[self._read :])
        self._read = len(log)
        for index in changed:
            chain = self._tree.chain[index]
            if difference := self._count(index) - self.slots[chain[-1]]:
                for domain in chain:
                    self.slots[domain] += difference
            for domain in reversed(chain):
                self.best[domain] = self._best(domain)

    def own(self, domain: int) -> float:
        """Return what stranding changes by in this domain alone when one more pod goes into it."""
        return self._kind.delta(domain, self._gpus) if self._kind is not None else 0.0

    def cheapest(self, domain: int, extra: Callable[[int], float | None]) -> tuple[float, int]:
        """Return what the best node in a domain costs, from that domain inwards, and the node.

        ``extra`` is what a domain costs besides, or None when it and all inside it cost nothing more. The caller sees
        to it that the domain has a slot. Of equal nodes the first is taken.
        """
        more = extra(domain)
        if more is None:
            return self.best[domain], self._first(domain)
        own = self.own(domain) + more
        if self._tree.node[domain] >= 0:
            return own, self._tree.node[domain]
        found, at, deep = inf, -1, -1
        for child in self._tree.children[domain]:
            if self.best[child] == inf:
                continue
            if extra(child) is not None:
                cost, node = self.cheapest(child, extra)
            else:
                cost, node = self.best[child], -1
            if cost < found - EPSILON:
                found, at, deep = cost, node, child
        return own + found, at if at >= 0 else self._first(deep)

    def _first(self, domain: int) -> int:
        """Return the first of the nodes in a domain that strand least."""
        while self._tree.node[domain] < 0:
            inside = self.best[domain] - self.own(domain) + EPSILON
            domain = next(child for child in self._tree.children[domain] if self.best[child] <= inside)
        return self._tree.node[domain]

    def _count(self, index: int) -> int:
        if not self.eligible[index]:
            return 0
        return max(0, min((free[index] // amount for free, amount in self._need), default=1))

    def _best(self, domain: int) -> float:
        if not self.slots[domain]:
            return inf
        children = self._tree.children[domain]
        inside = min([self.best[child] for child in children]) if children else 0.0
        return self.own(domain) + inside
