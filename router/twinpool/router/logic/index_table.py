"""Which holders have which blocks, in a fixed amount of memory: the store below both KV indices.

A table of 64-bit block keys, eight to a bucket like the ways of a processor's cache. Each entry names a *set* of
holders by number; most blocks share few sets, so a set is stored once, as the bits of an integer. Always true: an entry
takes 16 bytes and there are never more than ``capacity`` of them; a full bucket gives up its least recently used entry.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_WAYS = 8
#: Ticks are kept in 32 bits; what is older than half of that counts as new again, which only delays its eviction.
_TICKS = 2**32

#: Bytes of one entry: key, number of its set, tick of its last use.
ENTRY_BYTES = 16


class HolderSets:
    """Sets of holders by number. Number 0 is the empty set."""

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        self._counts: list[int] = [0]
        self._numbers: dict[int, int] = {0: 0}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Return how many sets are in use."""
        return len(self.masks) - len(self._free) - 1

    def take(self, mask: int) -> int:
        """Return the number of a set for one more block."""
        number = self._numbers.get(mask)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.masks[number], self._counts[number] = mask, 0
            else:
                number = len(self.masks)
                self.masks.append(mask)
                self._counts.append(0)
            self._numbers[mask] = number
        self._counts[number] += 1
        return number

    def take_more(self, number: int, blocks: int) -> None:
        """So many more blocks have a set that :meth:`take` gave out."""
        self._counts[number] += blocks

    def drop(self, number: int, blocks: int = 1) -> None:
        """So many blocks are no longer held by this set."""
        self._counts[number] -= blocks
        if not self._counts[number] and number:
            mask = self.masks[number]
            if self._numbers.get(mask) == number:
                del self._numbers[mask]
            self.masks[number] = 0
            self._free.append(number)

    def forget(self, bits: int) -> None:
        """Take holders out of all sets; two sets may then be equal, and one that is empty stays until its blocks go."""
        for number, mask in enumerate(self.masks):
            if mask & bits:
                if self._numbers.get(mask) == number:
                    del self._numbers[mask]
                self.masks[number] = mask & ~bits
                self._numbers.setdefault(mask & ~bits, number)


def runs(masks: Iterable[int]) -> list[tuple[int, int]]:
    """Return who is in how many of ``masks`` from the first on without a gap: (bits, number of masks), each bit once.

    Bits that are not even in the first one are left out.
    """
    found = []
    alive, depth = -1, 0
    for mask in masks:
        still = alive & mask
        if depth and still != alive:
            found.append((alive & ~still, depth))
        alive, depth = still, depth + 1
        if not still:
            return found
    return [*found, (alive, depth)] if depth else []


class BlockTable:
    """Blocks and their holders. Keys are whole numbers below 2**64; 0 stands for no block and is never stored.

    ``lost`` is told the holders (as bits) of each block that had to go for another.
    """

    def __init__(self, capacity: int, lost: Callable[[int], None] | None = None) -> None:
        self._buckets = max(1, capacity // _WAYS)
        slots = self._buckets * _WAYS
        self._keys = array("Q", bytes(8 * slots))
        self._sets = array("I", bytes(4 * slots))
        self._used = array("I", bytes(4 * slots))
        self._lost = lost
        self._tick = 0
        self.sets = HolderSets()
        #: Entries in use.
        self.entries = 0

    @property
    def capacity(self) -> int:
        """Return the most entries that there can be."""
        return len(self._keys)

    @property
    def table_bytes(self) -> int:
        """Return the bytes of the entries, which never change; the sets come on top."""
        return sum(part.itemsize * len(part) for part in (self._keys, self._sets, self._used))

    def tick(self) -> None:
        """Let time pass, by one request or one event."""
        self._tick = (self._tick + 1) % _TICKS

    def holders(self, key: int) -> int:
        """Return who holds a block, as bits, and note its use."""
        slot = self._find(key)
        if slot < 0:
            return 0
        self._used[slot] = self._tick
        return self.sets.masks[self._sets[slot]]

    def add(self, key: int, bits: int) -> int:
        """Add holders to a block; return those (as bits) that it did not have before."""
        if not key:
            return 0
        slot = self._find(key)
        if slot < 0:
            slot = self._room(key)
            self._keys[slot], self._sets[slot] = key, self.sets.take(bits)
            self._used[slot] = self._tick
            self.entries += 1
            return bits
        number = self._sets[slot]
        before = self.sets.masks[number]
        self._used[slot] = self._tick
        if bits & ~before:
            self._sets[slot] = self.sets.take(before | bits)
            self.sets.drop(number)
        return bits & ~before

    def remove(self, key: int, bits: int) -> int:
        """Take holders from a block; return those (as bits) that it had."""
        slot = self._find(key) if key else -1
        if slot < 0:
            return 0
        number = self._sets[slot]
        before = self.sets.masks[number]
        if not before & ~bits:
            self._clear(slot)
        elif before & bits:
            self._sets[slot] = self.sets.take(before & ~bits)
            self.sets.drop(number)
        return before & bits

    def add_all(self, keys: Iterable[int], bits: int) -> int:
        """Add holders to blocks; return how many of those did not have all of them before."""
        added = new = 0
        table, sets, used, tick, buckets = self._keys, self._sets, self._used, self._tick, self._buckets
        number = self.sets.take(bits)  # for the time of this call, whatever becomes of its blocks
        for key in keys:
            base = key % buckets * _WAYS
            ways = table[base : base + _WAYS]
            if key in ways or 0 not in ways:  # of new blocks, nearly none
                added += bool(self.add(key, bits))
                continue
            slot = base + ways.index(0)
            table[slot] = key
            sets[slot] = number
            used[slot] = tick
            new += 1
        self.entries += new
        self.sets.take_more(number, new)
        self.sets.drop(number)
        return added + new

    def remove_all(self, keys: Iterable[int], bits: int) -> int:
        """Take holders from blocks; return how many of those had one of them."""
        removed = gone = 0
        table, sets, used, buckets = self._keys, self._sets, self._used, self._buckets
        place_of = table.index
        number = self.sets.take(bits)  # its number stays for the time of this call
        for key in keys:
            base = key % buckets * _WAYS
            try:
                slot = place_of(key, base, base + _WAYS)
            except ValueError:
                continue
            if sets[slot] == number and key:
                table[slot] = sets[slot] = used[slot] = 0
                gone += 1
            else:
                removed += bool(self.remove(key, bits))
        self.entries -= gone
        self.sets.drop(number, gone + 1)
        return removed + gone

    def forget(self, bits: int) -> None:
        """Take holders from all blocks, in the time of the number of sets, not of blocks."""
        self.sets.forget(bits)

    def masks(self, keys: Iterable[int]) -> list[int]:
        """Return who holds each block of a chain, up to and without the first one that nobody holds."""
        self.tick()
        found = []
        # What :meth:`holders` does, without two calls for each of what may be thousands of blocks.
        place_of, sets, masks, used, tick, buckets = (
            self._keys.index, self._sets, self.sets.masks, self._used, self._tick, self._buckets,
        )  # fmt: skip
        for key in keys:
            base = key % buckets * _WAYS
            try:
                slot = place_of(key, base, base + _WAYS)
            except ValueError:
                break
            used[slot] = tick
            mask = masks[sets[slot]]
            if not mask:
                break
            found.append(mask)
        return found

    def _find(self, key: int) -> int:
        base = key % self._buckets * _WAYS
        try:
            return self._keys.index(key, base, base + _WAYS)
        except ValueError:
            return -1

    def _room(self, key: int) -> int:
        """Return a free slot of the key's bucket, made free when there is none."""
        base = key % self._buckets * _WAYS
        places = range(base, base + _WAYS)
        if 0 in (ways := self._keys[base : base + _WAYS]):
            return base + ways.index(0)
        for slot in places:
            if not self.sets.masks[self._sets[slot]]:
                self._clear(slot)
                return slot
        slot = max(places, key=lambda place: (self._tick - self._used[place]) % _TICKS)
        if self._lost is not None:
            self._lost(self.sets.masks[self._sets[slot]])
        self._clear(slot)
        return slot

    def _clear(self, slot: int) -> None:
        self.sets.drop(self._sets[slot])
        self._keys[slot] = self._sets[slot] = self._used[slot] = 0
        self.entries -= 1
