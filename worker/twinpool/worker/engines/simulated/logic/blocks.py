"""KV blocks: who holds which, which prefixes are cached, and which cached block goes first.

Always true: a block is either held (by one or more sequences) or in the free queue, never both; a free block keeps its
content and can be found again by its hash until it is given to somebody else. Order of the free queue is the order of
eviction, as in vLLM: least recently freed first, and of one sequence the last block first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twinpool.core.blockhash import Adapter


#: Where a block is, in vLLM's words.
Medium = Literal["GPU", "CPU"]


@dataclass(frozen=True, slots=True)
class Stored:
    """Full blocks entered the cache; ``parent`` is the hash of the block before them.

    ``salt`` is part of the name of a first block, which has no parent, ``adapter`` of every block's. Of a slower tier
    only the hashes are told.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]
    salt: str | None = None
    adapter: Adapter | None = None
    medium: Medium = "GPU"


@dataclass(frozen=True, slots=True)
class Removed:
    """A cached block was given to somebody else."""

    hash: int
    medium: Medium = "GPU"


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was forgotten."""


CacheEvent = Stored | Removed | Cleared


@dataclass(slots=True)
class BlockPool:
    """A fixed number of blocks. Ids start at 1, as in vLLM, where block 0 is never handed out."""

    total: int
    events: list[CacheEvent] = field(default_factory=list)
    _free: OrderedDict[int, None] = field(init=False)
    _holders: dict[int, int] = field(default_factory=dict)
    _hash_of: dict[int, int] = field(default_factory=dict)
    _block_of: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Put every block into the free queue."""
        self._free = OrderedDict.fromkeys(range(1, self.total + 1))

    @property
    def free(self) -> int:
        """Number of blocks that nobody holds."""
        return len(self._free)

    def cached(self, hashes: Iterable[int]) -> list[int]:
        """Return the blocks of the longest cached prefix of ``hashes``, without taking them."""
        found = []
        for value in hashes:
            block = self._block_of.get(value)
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, cached: Sequence[int], new: int) -> bool:
        """Return whether ``cached`` blocks can be held and ``new`` others be had at the same time."""
        return new <= self.free - sum(block in self._free for block in cached)

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold cached blocks once more."""
        for block in blocks:
            self._free.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def take(self, count: int) -> list[int]:
        """Return ``count`` free blocks, evicting what they cached; the caller has asked :meth:`fits`."""
        taken = []
        for _ in range(count):
            block, _nothing = self._free.popitem(last=False)
            evicted = self._hash_of.pop(block, None)
            if evicted is not None:
                del self._block_of[evicted]
                self.events.append(Removed(evicted))
            self._holders[block] = 1
            taken.append(block)
        return taken

    def drop(self, blocks: Sequence[int]) -> None:
        """Let go of blocks that were held; those that nobody else holds become free, the last one first."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._free[block] = None

    def store(
        self,
        blocks: Sequence[int],
        hashes: Sequence[int],
        parent: int | None,
        tokens: Sequence[int],
        salt: str | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Remember full blocks under their hashes; ``tokens`` are those of all of them.

        A hash that is cached already stays with its block, so that each hash is stored once and removed once.
        """
        size = len(tokens) // len(blocks)
        for index, (block, value) in enumerate(zip(blocks, hashes, strict=True)):
            if value not in self._block_of:
                self._block_of[value] = block
                self._hash_of[block] = value
                own = tuple(tokens[index * size : (index + 1) * size])
                self._append(Stored((value,), parent, own, salt if parent is None else None, adapter))
            parent = value

    def _append(self, stored: Stored) -> None:
        last = self.events[-1] if self.events else None
        if isinstance(last, Stored) and last.medium == "GPU" and last.hashes[-1] == stored.parent:
            self.events[-1] = replace(last, hashes=last.hashes + stored.hashes, tokens=last.tokens + stored.tokens)
        else:
            self.events.append(stored)

    def offloaded(self, new: Sequence[int], gone: Sequence[int]) -> None:
        """Tell of blocks that came into the host's memory, and of those that left it."""
        self.events += [Stored(tuple(new), None, (), medium="CPU")] if new else []
        self.events += [Removed(value, "CPU") for value in gone]

    def clear(self) -> bool:
        """Forget every cached prefix; refused (False) while any block is held, as in vLLM."""
        if self._holders:
            return False
        self._hash_of.clear()
        self._block_of.clear()
        self.events.append(Cleared())
        return True

    def drained(self) -> list[CacheEvent]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events
