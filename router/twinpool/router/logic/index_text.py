"""Prompts as chains of text blocks: two prompts that begin alike have the same first keys.

The text is the raw JSON that decides the prompt, in the order in which chat templates use it (tools before messages):
nothing is decoded or tokenized. Keys are Python's own seeded hashes: quick, no client can make two prompts meet on
purpose, and of no use outside this process, which is why this index is never shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from twinpool.router.logic.request import Fields

#: Bytes of the first blocks: about 128 tokens, eight blocks of vLLM. Smaller ones cost time, larger ones overlook short
#: system prompts.
BLOCK_BYTES: Final = 512
#: Later blocks are as long as this share of what stands before them (to a power of two): a block that two prompts share
#: in part counts as not shared, which so is at most an eighth of what they share, and a prompt has few blocks.
_SHARE: Final = 8
#: Longest text that is looked at; what two prompts share beyond 1 MiB decides nothing.
_LONGEST: Final = 2**20

#: What a prompt consists of, in the order of chat templates.
_PARTS: Final = ("model", "tools", "messages", "prompt")
_KEY_MASK: Final = 2**64 - 1


def _block_ends() -> tuple[int, ...]:
    ends = [BLOCK_BYTES]
    while ends[-1] < _LONGEST:
        ends.append(ends[-1] + max(BLOCK_BYTES, 2 ** (ends[-1].bit_length() - 1) // _SHARE))
    return tuple(ends)


_ENDS: Final = _block_ends()


def text_of(fields: Fields, adapter: str = "", shrunk: bytes = b"") -> bytes:
    """Return the text that decides which KV a request needs; empty when it has none.

    KV of one LoRA ``adapter`` is of no use to the model or another one. ``shrunk`` stands for messages with media.
    """
    if shrunk:
        fields = {**fields, "messages": msgspec.Raw(shrunk)}
    parts: list[Buffer] = [fields[name] for name in _PARTS if name in fields]  # joined without a copy of each
    if adapter:
        parts.insert(0, adapter.encode())
    return b"\n".join(parts)[:_LONGEST]


def chain(text: bytes) -> tuple[int, ...]:
    """Return the key of each full block of ``text``; a key stands for its block and all before it, and is never 0."""
    keys = []
    parent = start = 0
    size = len(text)
    for end in _ENDS:
        if end > size:
            break
        parent = hash((parent, text[start:end])) & _KEY_MASK or 1
        keys.append(parent)
        start = end
    return tuple(keys)


def bytes_of(blocks: int) -> int:
    """Return how many bytes the first ``blocks`` blocks of a text have."""
    return _ENDS[blocks - 1] if blocks else 0
