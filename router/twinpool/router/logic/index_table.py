"""Which holders have which blocks, in a fixed amount of memory: the store below both KV indices.

A table of 64-bit block keys, eight to a bucket like the ways of a processor's cache. A key has a home, the entry that
its low bits say, and is elsewhere in its bucket only where that was taken: most are found, or known to be missing, by
one look. What belongs to a key stands behind it, so that a look is one visit to memory, which costs more than the look.
Each entry names a *set* of holders by number; most blocks share few sets, so a set is stored once, as the bits of an
integer. Always true: an entry takes 16 bytes, a bucket one more, and there are never more than ``capacity`` entries; a
full bucket gives up its least recently used one; one whose count of displaced keys is 0 has all of its keys at home.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_WAYS = 8
#: Words of a bucket: of each entry the key, then the tick of its last use above the number of its set.
_WORDS = 2 * _WAYS
_NUMBER = 2**32 - 1
#: Ticks are kept in 32 bits; what is older than half of that counts as new again, which only delays its eviction.
_TICKS = 2**32

#: Bytes of one entry.
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
    alive, depth, before = -1, 0, None
    for mask in masks:
        if mask is not before:  # most blocks of a prompt have one set
            before, still = mask, alive & mask
            if depth and still != alive:
                found.append((alive & ~still, depth))
            if not still:
                return found
            alive = still
        depth += 1
    return [*found, (alive, depth)] if depth else []


class BlockTable:
    """Blocks and their holders. Keys are whole numbers below 2**64; 0 stands for no block and is never stored.

    ``capacity`` is rounded down to a power of two, at least eight.

    ``lost`` is told the holders (as bits) of each block that had to go for another.
    """

    def __init__(self, capacity: int, lost: Callable[[int], None] | None = None) -> None:
        buckets = 1 << (max(1, capacity // _WAYS).bit_length() - 1)
        self._words = array("Q", bytes(ENTRY_BYTES * _WAYS * buckets))
        #: The bits of a key that say which entry is its home: the lowest, so that keys in a row fill buckets too.
        self._homes = _WAYS * buckets - 1
        #: Keys of each bucket that are not at home.
        self._displaced = bytearray(buckets)
        self._lost = lost
        self._tick = 0
        self.sets = HolderSets()
        #: Entries in use.
        self.entries = 0

    @property
    def capacity(self) -> int:
        """Return the most entries that there can be."""
        return len(self._words) // 2

    @property
    def table_bytes(self) -> int:
        """Return the bytes of the entries, which never change; the sets come on top."""
        return self._words.itemsize * len(self._words) + len(self._displaced)

    def tick(self) -> None:
        """Let time pass, by one request or one event."""
        self._tick = (self._tick + 1) % _TICKS

    def holders(self, key: int) -> int:
        """Return who holds a block, as bits, and note its use."""
        place = self._find(key)
        if place < 0:
            return 0
        number = self._words[place + 1] & _NUMBER
        self._words[place + 1] = self._stamp | number
        return self.sets.masks[number]

    def add(self, key: int, bits: int) -> int:
        """Add holders to a block; return those (as bits) that it did not have before."""
        if not key:
            return 0
        words, place = self._words, self._find(key)
        if place < 0:
            place = self._room(key)
            words[place], words[place + 1] = key, self._stamp | self.sets.take(bits)
            self._displaced[place // _WORDS] += place != 2 * (key & self._homes)
            self.entries += 1
            return bits
        number = words[place + 1] & _NUMBER
        before = self.sets.masks[number]
        if bits & ~before:
            number = self.sets.take(before | bits)
            self.sets.drop(words[place + 1] & _NUMBER)
        words[place + 1] = self._stamp | number
        return bits & ~before

    def remove(self, key: int, bits: int) -> int:
        """Take holders from a block; return those (as bits) that it had."""
        place = self._find(key) if key else -1
        if place < 0:
            return 0
        word = self._words[place + 1]
        number = word & _NUMBER
        before = self.sets.masks[number]
        if not before & ~bits:
            self._clear(place)
        elif before & bits:
            self._words[place + 1] = word - number + self.sets.take(before & ~bits)
            self.sets.drop(number)
        return before & bits

    def add_all(self, keys: Iterable[int], bits: int) -> int:
        """Add holders to blocks; return how many of those did not have all of them before."""
        added, new, low = 0, 0, _NUMBER
        words, displaced, homes = self._words, self._displaced, self._homes
        number = self.sets.take(bits)  # for the time of this call, whatever becomes of its blocks
        word = self._stamp | number
        for key in keys:
            place = 2 * (key & homes)
            found = words[place]
            if not found and key and not displaced[place // _WORDS]:
                words[place] = key
                words[place + 1] = word
                new += 1
            elif found == key and words[place + 1] & low == number:
                words[place + 1] = word
            else:
                added += bool(self.add(key, bits))
        self.entries += new
        self.sets.take_more(number, new)
        self.sets.drop(number)
        return added + new

    def remove_all(self, keys: Sequence[int], bits: int) -> int:
        """Take holders from blocks; return how many of those had one of them."""
        removed, low = 0, _NUMBER
        words, homes = self._words, self._homes
        number = self.sets.take(bits)  # its number stays for the time of this call
        others = []
        for key in keys:
            place = 2 * (key & homes)
            if words[place] == key and words[place + 1] & low == number:
                words[place] = 0  # what stands behind it means nothing then
            else:
                others.append(key)
        if not words[0]:
            words[1] = 0  # or 0, which is no key, would seem to be held here
        gone = len(keys) - len(others)
        for key in others:
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
        found: list[int] = []
        append = found.append
        # What :meth:`holders` does, without a call for each of what may be thousands of blocks. Those of one prompt
        # mostly have one set and were used last at one time: their words are equal, and are made once.
        words, homes = self._words, self._homes
        before, now, mask = -1, 0, 0
        for key in keys:
            place = 2 * (key & homes)
            if words[place] != key:
                place = self._find(key)
                if place < 0:
                    break
            place += 1
            word = words[place]
            if word != before:
                before, number = word, word & _NUMBER
                now, mask = self._stamp | number, self.sets.masks[number]
            words[place] = now
            if not mask:
                break
            append(mask)
        return found

    @property
    def _stamp(self) -> int:
        """Return what an entry's second word says of its last use, when that is now."""
        return self._tick << 32

    def _find(self, key: int) -> int:
        """Return the place of a key in the words, or -1."""
        place = 2 * (key & self._homes)
        if self._words[place] == key:
            return place
        if self._displaced[place // _WORDS]:
            base = place & -_WORDS
            for place in range(base, base + _WORDS, 2):
                if self._words[place] == key:
                    return place
        return -1

    def _room(self, key: int) -> int:
        """Return a free place of the key's bucket, its home if that is free; made free when there is none."""
        words, home = self._words, 2 * (key & self._homes)
        if not words[home]:
            return home
        base = home & -_WORDS
        places = range(base, base + _WORDS, 2)
        if 0 in (ways := words[base : base + _WORDS : 2]):
            return places[ways.index(0)]
        for place in places:
            if not self.sets.masks[words[place + 1] & _NUMBER]:
                self._clear(place)
                return place
        place = max(places, key=lambda place: (self._tick - (words[place + 1] >> 32)) % _TICKS)
        if self._lost is not None:
            self._lost(self.sets.masks[words[place + 1] & _NUMBER])
        self._clear(place)
        return place

    def _clear(self, place: int) -> None:
        words = self._words
        self.sets.drop(words[place + 1] & _NUMBER)
        self._displaced[place // _WORDS] -= place != 2 * (words[place] & self._homes)
        words[place] = words[place + 1] = 0
        self.entries -= 1
