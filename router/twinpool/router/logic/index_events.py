"""KV events of engines: reading vLLM's messages, and keeping a stream of them free of gaps.

A message is numbered from 0 for each engine process and data-parallel rank. ZMQ drops what a slow reader does not take,
so numbers can be missing; engines replay recent ones on request (vLLM 0.32, ``--kv-events-config``). Always true: what
:class:`Feed` gives out is in order and without a gap, or begins with a reset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

STORED: Final = "BlockStored"
REMOVED: Final = "BlockRemoved"
CLEARED: Final = "AllBlocksCleared"

#: Messages that are held back while a replay is awaited; beyond it the gap is given up.
_HELD_BACK: Final = 4096
_KEY_MASK: Final = 2**64 - 1


class Event(msgspec.Struct):
    """One event, as far as an index needs it; fields of kinds that it does not know are ignored."""

    type: str
    block_hashes: list[int | bytes] = []
    #: Where the blocks are, such as ``GPU``.
    medium: str | None = None

    def hashes(self) -> list[int]:
        """Return the blocks' hashes, the low 64 bits of those that come in full."""
        return [key if isinstance(key, int) else int.from_bytes(key, "big") & _KEY_MASK for key in self.block_hashes]


Events = tuple[Event, ...]

_decode = msgspec.msgpack.Decoder(tuple[float, Events, Any]).decode


def events_of(payload: bytes) -> Events | None:
    """Return the events of a message's last frame (msgpack of time, events and rank), or None when it is none."""
    try:
        return _decode(payload)[1]
    except (msgspec.DecodeError, ValueError):
        return None


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
        self._held: dict[int, Events] = {}

    @property
    def waiting(self) -> bool:
        """Return whether a replay is awaited."""
        return bool(self._held)

    def receive(self, number: int, events: Events) -> Take:
        """Take a message as it was published."""
        expected = self._next
        if number == 0 and expected:
            # The process began anew: what it held before is gone.
            self._held.clear()
            self._next = 1
            return Take((events,), reset=True)
        wanted = expected or 0
        if number < wanted:
            return Take()
        if number == wanted and not self._held:
            self._next = number + 1
            return Take((events,))
        asked = self.waiting
        self._held[number] = events
        if len(self._held) > _HELD_BACK:
            return self._give_up()
        return Take(replay=None if asked else wanted)

    def replayed(self, messages: Iterable[tuple[int, Events]]) -> Take:
        """Take the answer to a replay; what it does not bring is missing for good."""
        for number, events in messages:
            if number >= (self._next or 0):
                self._held.setdefault(number, events)
        return self._give_up()

    def _give_up(self) -> Take:
        """Apply what there is, after a reset when something is missing.

        At the start nothing is known that a missed removal could make wrong, so a late reader just knows less.
        """
        expected, began = self._next or 0, self._next is None
        batches: list[Events] = []
        reset = False
        for number in sorted(self._held):
            if number != expected and not began:
                batches, reset = [], True
            batches.append(self._held[number])
            expected, began = number + 1, False
        self._held.clear()
        self._next = expected
        return Take(tuple(batches), reset)
