"""Which prompt blocks a simulated worker holds. Always true: never more than its capacity, least recently used goes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Cache:
    """An LRU of block names. ``told`` hears of all blocks that come (True) or go (False) at one time."""

    def __init__(self, capacity: int, told: Callable[[list[int], bool], None] | None = None) -> None:
        self._capacity = capacity
        self._told = told
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def leading(self, blocks: Sequence[int]) -> int:
        """Return how many of ``blocks``, from the first on, are held without a gap."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += 1
        return count

    def use(self, blocks: Iterable[int]) -> None:
        """Hold ``blocks`` as the last to be evicted, the first of them last of all: without it the rest is useless."""
        came = []
        for block in reversed(tuple(blocks)):
            if block in self._blocks:
                self._blocks.move_to_end(block)
            else:
                self._blocks[block] = None
                came.append(block)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._capacity)]
        if self._told is not None:
            if came:
                self._told(came, True)
            if gone:
                self._told(gone, False)
