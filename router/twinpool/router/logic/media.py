"""Images, audio and video inside a chat: told apart by what they are, counted by what a model reads of them.

Clients send them as base64 in the JSON of the messages, megabytes that are no text. In the text by which prompts are
compared each stands as a short stand-in instead: equal ones have the same, whatever their size, and nothing is decoded.
To the eye of :mod:`twinpool.router.logic.index_text` a stand-in is as long as the tokens it is taken for. What is sent
by a link stays: the link tells it apart, and its size is not known here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Tokens for which one image or recording is taken; a megapixel is 600 to 1300 tokens of common models.
TOKENS: Final = 1024
#: Bytes between two looks for base64. A shorter string than two of them may stay as it is: it is soon read.
STRIDE: Final = 4096
#: Bytes at the beginning, in the middle and at the end of a recording that tell it from others of its length.
_SAMPLE: Final = 4096

_BASE64: Final = re.compile(rb"[A-Za-z0-9+/=]{64}")
_SPACE: Final = rb"[ \t\r\n]*"
#: What stands before a string of media: OpenAI's parts with a data URL, OpenAI's audio, and Anthropic's sources.
_URL: Final = re.compile(rb'"(?:(?:image|audio|video)_)?url"' + _SPACE + b":" + _SPACE + rb'"\Z')
_DATA: Final = re.compile(rb'"data"' + _SPACE + b":" + _SPACE + rb'"\Z')
#: Longest of those, with some white space.
_BEFORE: Final = 64


def likely(body: bytes) -> bool:
    """Whether there may be media in a body: what is not worth a copy of the messages has none."""
    return any(_BASE64.match(body, place) is not None for place in range(STRIDE, len(body), STRIDE))


def shrunk(text: bytes) -> bytes:
    """Return JSON with a stand-in for each long string of media; empty when there is none.

    Text costs one look each 4 KiB, media the search for its end and a look at three parts of it.
    """
    pieces: list[bytes] = []
    done = 0
    for start, end in _spans(text):
        pieces += (text[done:start], _stand_in(text, start, end))
        done = end
    return b"".join((*pieces, text[done:])) if pieces else b""


def _spans(text: bytes) -> Iterator[tuple[int, int]]:
    """Yield where the contents of strings of media begin and end."""
    place, size = STRIDE, len(text)
    while place < size:
        if _BASE64.match(text, place) is not None:
            start, end = text.rfind(b'"', 0, place) + 1, text.find(b'"', place)  # JSON, so each string ends
            before = max(0, start - _BEFORE)
            if (_DATA if not text.startswith(b"data:", start) else _URL).search(text, before, start):
                yield start, end
            place = end
        place += STRIDE


def _stand_in(text: bytes, start: int, end: int) -> bytes:
    starts = (start, (start + end) // 2, max(start, end - _SAMPLE))
    parts = [text[place : min(end, place + _SAMPLE)] for place in starts]
    # Python's own hash, like the keys of blocks: 16 digits, as often as fills the tokens at 4 bytes each.
    return b"%016x" % (hash((end - start, *parts)) % 2**64) * (TOKENS // 4)
