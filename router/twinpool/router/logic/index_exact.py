"""What workers hold, by their own word: the KV index fed by engines' events.

Blocks are the engines' own, by hash; a holder is one data-parallel rank of one engine process, by a name that changes
when the process restarts (:mod:`twinpool.router.logic.seats`). What it has in slower tiers is told apart from what is
on the accelerator. What was just sent counts as held for a while, because events come only once it is computed, and
equal prompts that arrive together should meet. Always true: with all events applied, an answer names a block (but for
those expected) only if its holder has it, and misses one only if the table was full, which
:meth:`ExactIndex.coverage` shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from heapq import heappop, heappush
from operator import or_
from typing import TYPE_CHECKING, Final

from twinpool.router.logic.index_events import CLEARED, REMOVED, STORED
from twinpool.router.logic.index_table import BlockTable, runs

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from twinpool.router.logic.index_events import Events

#: Tiers by the ``medium`` of events (vLLM 0.32 says GPU on every accelerator, also on a CPU); any other is the last.
_TIERS: Final = {"GPU": 0, "CPU": 1, "DISK": 2}
_OTHER: Final = 3
_EXPECTED: Final = 4
_BITS: Final = 5
_STORED: Final = 2**_EXPECTED - 1

#: Seconds for which a prompt that was sent counts as held, beyond those that it is expected to take: engines read
#: 100 000 tokens in that time.
EXPECT_SECONDS: Final = 10.0
#: Most blocks that are expected at a time; the oldest give way.
_MOST_EXPECTED: Final = 2**18


@dataclass(frozen=True, slots=True)
class Held:
    """Leading blocks of a prompt that a holder has: on the accelerator, in any tier, and with those expected."""

    device: int
    anywhere: int
    expected: int = 0


class ExactIndex:
    """Blocks by holder."""

    def __init__(self, capacity: int) -> None:
        self.table = BlockTable(capacity, self._lost)
        self._places: dict[str, int] = {}
        self._free: list[int] = []
        #: One bit for each holder's first tier.
        self._ones = 0
        #: Blocks that each place should have by its events, and those that the table has of it.
        self._stored: dict[int, int] = {}
        self._kept: dict[int, int] = {}
        #: What was sent: until when, where to, and which blocks.
        self._expected: list[tuple[float, int, Sequence[int]]] = []
        self._expecting = 0

    def apply(self, holder: str, events: Events) -> None:
        """Follow one message of an engine.

        Engines tell of each block that goes by an event of its own, so changes of one kind are made together.
        """
        place = self._place(holder)
        self.table.tick()
        kind, medium, keys = "", None, list[int]()
        for event in events:
            if event.group_idx:
                continue
            if event.type != kind or event.medium != medium:
                self._change(place, kind, medium, keys)
                kind, medium, keys = event.type, event.medium, []
            keys += event.block_hashes
        self._change(place, kind, medium, keys)

    def _change(self, place: int, kind: str, medium: str | None, keys: list[int]) -> None:
        if kind == CLEARED:
            self._forget(place)
        elif kind == STORED:
            self._stored[place] += len(keys)
            added = self.table.add_all(keys, self._bit(place, medium))  # which may tell of others that had to go
            self._kept[place] += added
        elif kind == REMOVED:
            self._stored[place] = max(0, self._stored[place] - len(keys))
            self._kept[place] -= self.table.remove_all(keys, self._bit(place, medium))

    @staticmethod
    def _bit(place: int, medium: str | None) -> int:
        return 1 << (place * _BITS + _TIERS.get(medium or "GPU", _OTHER))

    def expect(self, holder: str, keys: Sequence[int], now: float, wait: float = 0.0) -> None:
        """A prompt with these blocks was sent to ``holder``, where it is expected to be read in ``wait`` seconds."""
        place = self._place(holder)
        bit = 1 << (place * _BITS + _EXPECTED)
        self.table.add_all(keys, bit)
        heappush(self._expected, (now + wait + EXPECT_SECONDS, place, keys))
        self._expecting += len(keys)
        self.expire(now)

    def expire(self, now: float) -> None:
        """Expect no more what was sent too long ago, or is too much."""
        while self._expected and (self._expected[0][0] <= now or self._expecting > _MOST_EXPECTED):
            _, place, keys = heappop(self._expected)
            self._expecting -= len(keys)
            self.table.remove_all(keys, 1 << (place * _BITS + _EXPECTED))

    def reset(self, holder: str) -> None:
        """Forget what a holder has: its engine began anew, or events of it are missing."""
        if holder in self._places:
            self._forget(self._places[holder])

    def keep(self, holders: Container[str]) -> None:
        """Forget the holders that are not among ``holders``."""
        for holder in [holder for holder in self._places if holder not in holders]:
            place = self._places.pop(holder)
            self._forget(place)
            self._ones &= ~(1 << place * _BITS)
            self._free.append(place)

    def leading(self, keys: Iterable[int]) -> dict[str, Held]:
        """Return how many blocks of a chain each holder has from the first on; those with none are left out."""
        masks = self.table.masks(keys)
        if not masks:
            return {}
        ones, union = self._ones, reduce(or_, masks)
        device = _depths(runs(mask & ones for mask in masks))
        anywhere = expected = device
        # Most prompts are in accelerators alone, and asking for the rest costs as much again.
        if union & ~ones:
            anywhere = _depths(runs((mask | mask >> 1 | mask >> 2 | mask >> 3) & ones for mask in masks))
            expected = _depths(runs((mask | mask >> _EXPECTED) & ones for mask in masks))
        places = anywhere.keys() | expected.keys()
        return {
            holder: Held(device.get(place, 0), anywhere.get(place, 0), expected.get(place, 0))
            for holder, place in self._places.items()
            if place in places
        }

    def blocks(self, holder: str) -> int:
        """Return how many blocks a holder has by its events; one that is in two tiers counts twice."""
        return self._stored.get(self._places.get(holder, -1), 0)

    def coverage(self, holder: str) -> float:
        """Return the share of a holder's blocks that the table has; 1.0 when it has none."""
        place = self._places.get(holder)
        stored = 0 if place is None else self._stored[place]
        return min(1.0, self._kept[self._places[holder]] / stored) if stored else 1.0

    def _place(self, holder: str) -> int:
        place = self._places.get(holder)
        if place is None:
            place = self._places[holder] = self._free.pop() if self._free else len(self._places)
            self._stored[place] = self._kept[place] = 0
            self._ones |= 1 << place * _BITS
        return place

    def _forget(self, place: int) -> None:
        self.table.forget((2**_BITS - 1) << place * _BITS)
        self._stored[place] = self._kept[place] = 0

    def _lost(self, mask: int) -> None:
        while mask:
            place = ((mask & -mask).bit_length() - 1) // _BITS
            tier = mask >> place * _BITS & (2**_BITS - 1)
            self._kept[place] -= (tier & _STORED).bit_count()
            mask &= ~((2**_BITS - 1) << place * _BITS)


def _depths(found: list[tuple[int, int]]) -> dict[int, int]:
    """Return how many blocks each place has, from what has so many."""
    result = {}
    for bits, depth in found:
        left = bits
        while left:
            low = left & -left
            result[(low.bit_length() - 1) // _BITS] = depth
            left ^= low
    return result
