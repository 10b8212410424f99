"""What is known of one engine's KV events, and whether routing may rely on them. Pure.

Blocks of prompts are found by names that the router computes itself, so an engine that names them otherwise (another
hash, seed or version) would look empty for ever. Its first blocks of prompts come with their tokens: those are checked.
Always true: an engine is relied on only while its publisher answers, its names are right and its block size is that of
the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from twinpool.core.blockhash import chain
from twinpool.router.logic.index_events import STORED, Feed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.router.logic.index_events import Event, Events

#: Right names after which checks become rare, and one in how many is then still made.
_SURE: Final = 8
_SAMPLED: Final = 64

_tokens = msgspec.msgpack.Decoder(list[int]).decode


@dataclass(slots=True)
class Source:
    """One engine process. Counts are of its whole life."""

    feed: Feed = field(default_factory=Feed)
    #: The publisher answered the last question for a replay, or sent something where there are no replays.
    answers: bool = False
    #: Tokens of a block; 0: not known yet.
    size: int = 0
    right: int = 0
    wrong: int = 0
    messages: int = 0
    gaps: int = 0
    resets: int = 0
    _roots: int = 0

    def check(self, events: Events) -> None:
        """Look at the names of the first blocks of prompts among ``events``."""
        for event in events:
            if event.type != STORED or event.group_idx:
                continue
            self.size = event.block_size
            if event.parent_block_hash is None and not event.lora_id:
                self._roots += 1
                if self.right < _SURE or self._roots % _SAMPLED == 0:
                    self._compare(event)

    def _compare(self, event: Event) -> None:
        salts = (event.extra_keys or [None])[0]
        if salts is not None and not (isinstance(salts, list) and len(salts) == 1 and isinstance(salts[0], str)):
            return  # images and adapters are named too; only token ids and salts are computed here
        salt = None if salts is None else salts[0]
        try:
            names = chain(_tokens(event.token_ids), event.block_size, 1, salt)
        except (msgspec.DecodeError, ValueError, ZeroDivisionError):
            names = []
        if names == event.block_hashes[:1]:
            self.right += 1
        else:
            self.wrong += 1

    def trouble(self, size: int) -> str:
        """Return why routing may not rely on this engine's events, given the block size of most; empty: it may."""
        if not self.answers:
            return "its publisher of KV events does not answer"
        if self.wrong:
            return "it names blocks in another way (hash algorithm, PYTHONHASHSEED or version)"
        if self.size and size and self.size != size:
            return f"its blocks have {self.size} tokens, those of most engines {size}"
        return ""


def common_size(sources: Iterable[Source]) -> int:
    """Return the block size that most engines have, of equals the smaller; 0 while none is known."""
    counts = Counter(source.size for source in sources if source.size)
    return min(counts, key=lambda size: (-counts[size], size)) if counts else 0
