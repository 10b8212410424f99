"""Prompts as chains of text blocks: two prompts that begin alike have the same first keys.

The text is the raw JSON that decides the prompt, in the order in which chat templates use it (tools before messages):
nothing is decoded or tokenized. Keys are Python's own seeded hashes: quick, no client can make two prompts meet on
purpose, and of no use outside this process, which is why this index is never shared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from twinpool.router.logic.request import Fields

#: Bytes of one block: about 128 tokens, eight blocks of vLLM. Smaller ones cost time, larger ones overlook short
#: system prompts.
BLOCK_BYTES: Final = 512
#: Longest text that is looked at; what two prompts share beyond 1 MiB decides nothing.
_LONGEST: Final = 2**20

#: What a prompt consists of, in the order of chat templates.
_PARTS: Final = ("model", "tools", "messages", "prompt")
_KEY_MASK: Final = 2**64 - 1


def text_of(fields: Fields) -> bytes:
    """Return the text that decides which KV a request needs; empty when it has none."""
    parts = [bytes(fields[name]) for name in _PARTS if name in fields]
    return b"\n".join(parts)[:_LONGEST]


def chain(text: bytes) -> tuple[int, ...]:
    """Return the key of each full block of ``text``; a key stands for its block and all before it, and is never 0."""
    keys = []
    parent = 0
    for start in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        parent = hash((parent, text[start : start + BLOCK_BYTES])) & _KEY_MASK or 1
        keys.append(parent)
    return tuple(keys)
