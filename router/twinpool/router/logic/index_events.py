"""KV events of engines: reading vLLM's messages, and keeping a stream of them free of gaps.

A message is numbered from 0 for each engine process and data-parallel rank. ZMQ drops what a slow reader does not take,
so numbers can be missing; engines replay recent ones on request (vLLM 0.32, ``--kv-events-config``). Always true: what
:class:`Feed` gives out is in order and without a gap, or begins with a reset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec.structs import replace

STORED: Final = "BlockStored"
REMOVED: Final = "BlockRemoved"
CLEARED: Final = "AllBlocksCleared"

#: Messages that are held back while a replay is awaited; beyond it the gap is given up.
_HELD_BACK: Final = 4096
_KEY_MASK: Final = 2**64 - 1


class Event(msgspec.Struct, gc=False):
    """One event, as far as an index needs it; fields of kinds that it does not know are ignored."""

    type: str
    #: The low 64 bits of the blocks' hashes.
    block_hashes: list[int] = []
    #: Where the blocks are, such as ``GPU``.
    medium: str | None = None
    #: Of models with several kinds of attention, each has a group, with blocks of its own under the same names.
    group_idx: int | None = None
    parent_block_hash: int | bytes | None = None
    #: Tokens of all blocks, not read yet: only a few are checked.
    token_ids: msgspec.Raw = msgspec.Raw()
    block_size: int = 0
    lora_id: int | None = None
    extra_keys: list[Any] | None = None


class _Full(Event, gc=False):
    """An event of an engine that publishes hashes in full."""

    block_hashes: list[int | bytes] = []  # type: ignore[assignment]


Events = tuple[Event, ...]

_decode = msgspec.msgpack.Decoder(tuple[float, Events, Any]).decode
_decode_full = msgspec.msgpack.Decoder(tuple[float, tuple[_Full, ...], Any]).decode


def events_of(payload: bytes) -> Events | None:
    """Return the events of a message's last frame (msgpack of time, events and rank), or None when it is none."""
    try:
        return _together(_decode(payload)[1])
    except msgspec.ValidationError:
        return _full_events_of(payload)
    except (msgspec.DecodeError, ValueError):
        return None


def _together(events: Events) -> Events:
    """Make one event of removals in a row: engines tell of each block by itself, as it is taken for another."""
    merged: list[Event] = []
    keys: list[int] | None = None  # of the removal that others are added to, and where those blocks were
    medium = group = None
    for event in events:
        if event.type != REMOVED:
            keys = None
        elif keys is not None and event.medium == medium and event.group_idx == group:
            keys += event.block_hashes
            continue
        else:
            keys, medium, group = event.block_hashes, event.medium, event.group_idx
        merged.append(event)
    return tuple(merged)


def _full_events_of(payload: bytes) -> Events | None:
    try:
        found = _decode_full(payload)[1]
    except (msgspec.DecodeError, ValueError):
        return None
    return tuple(replace(event, block_hashes=[_low_bits(key) for key in event.block_hashes]) for event in found)


def _low_bits(key: int | bytes) -> int:
    return key if isinstance(key, int) else int.from_bytes(key, "big") & _KEY_MASK


@dataclass(frozen=True, slots=True)
class Take:
    """What a reader does: first forget all that it knows of the engine (``reset``), then apply ``batches`` in order.

    ``replay`` is the first number to ask for, when something is missing.
    """

    batches: tuple[Events, ...] = ()
    reset: bool = False
    replay: int | None = None


class Feed:
    """The stream of one engine process and rank."""

    def __init__(self) -> None:
        #: The number that comes next; None before the first message.
        self._next: int | None = None
        #: The last number that came as published.
        self._live = -1
        self._held: dict[int, Events] = {}
        #: Whether the present replay brought something.
        self._brought = False

    @property
    def wanted(self) -> int:
        """Return the number from which a replay would bring what is missing."""
        return self._next or 0

    @property
    def waiting(self) -> bool:
        """Return whether something is missing that a replay may bring."""
        return bool(self._held)

    def receive(self, number: int, events: Events) -> Take:
        """Take a message as it was published."""
        back, self._live = number <= self._live, number
        if back:
            # No process publishes a number twice, so this is another one: what the old one held is gone.
            self._held.clear()
            self._next = None
        if number == self.wanted and not self._held:
            self._next = number + 1
            return Take((events,), reset=back)
        if number < self.wanted:
            return Take()
        asked = self.waiting
        self._held[number] = events
        if len(self._held) > _HELD_BACK:
            return self._give_up()
        return Take(reset=back, replay=None if asked else self.wanted)

    def replayed(self, number: int, events: Events) -> Take:
        """Take one message of a replay; what lies between it and those known is missing for good."""
        wanted = self._next
        if wanted is not None and number < wanted:
            return Take()
        self._next, self._brought = number + 1, True
        self._held.pop(number, None)
        return Take((events,), reset=wanted is not None and number > wanted)

    def replay_ended(self) -> Take:
        """Go on with what was held back, ask again while replays bring something, or give the gap up."""
        brought, self._brought = self._brought, False
        batches = []
        while (number := self.wanted) in self._held:
            batches.append(self._held.pop(number))
            self._next = number + 1
        if self._held and brought:
            return Take(tuple(batches), replay=self._next)
        return self._give_up(batches)

    def _give_up(self, batches: list[Events] | None = None) -> Take:
        """Apply what there is, after a reset when something is missing.

        At the start nothing is known that a missed removal could make wrong, so a late reader just knows less.
        """
        batches, reset = batches or [], False
        for number in sorted(self._held):
            if self._next is not None and number != self._next:
                batches, reset = [], True
            batches.append(self._held[number])
            self._next = number + 1
        self._held.clear()
        return Take(tuple(batches), reset)
