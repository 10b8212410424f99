"""Whether to ask the pool's renderer for the token ids of a prompt, and whether what it says can be built upon.

Ids name the KV blocks of a prompt, which KV events tell of, where text only gives an estimate. They cost a render's
time, so they are asked for where they may save more than that. Always true: ids are put in the place of a text only
after engines have read the very same ones several times, and a single difference ends that, and the asking, for
:data:`DISTRUST_SECONDS`: a prompt of other tokens would be answered as another prompt.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from twinpool.router.logic.request import Route, token_ids

if TYPE_CHECKING:
    from twinpool.router.logic.request import Request

#: Bytes of a body below which ids cannot save what they cost: 500 tokens are read in 20 ms.
LEAST_BYTES: Final = 2048
#: A render's time before any was seen, in seconds: for each one, and for each byte (``vllm launch render`` took 19 ms
#: of CPU for 32,000 characters).
_SETUP: Final = 0.002
_PER_BYTE: Final = 0.6e-6
#: Share of the distance to the last render's time that the learnt one goes.
_WEIGHT: Final = 0.1
#: A render is given up after twice the time expected of it, and never before this, in seconds.
_PATIENCE: Final = 0.05
#: Share of what is at stake that ids are expected to save before anything was seen.
_HOPE: Final = 0.5
#: Share of the distance to these beginnings that what was learnt goes back with each prompt that it kept from being
#: rendered: a change would not be seen otherwise. Useless renders so stay below one in twenty.
_FADE: Final = 0.001

#: Renders that engines must have agreed with before ids take the place of texts, and how many of them after that, each
#: one of so many, are still left to the engine for comparison.
ENOUGH: Final = 3
CHECKED_EACH: Final = 16
#: Seconds for which nothing is rendered after a difference.
DISTRUST_SECONDS: Final = 600.0

_QUOTE: Final = ord('"')
#: A part of a message that is not text: its blocks are named by more than token ids.
_OTHER_PART: Final = re.compile(rb'"type"\s*:\s*"(?!text"|function")')


def renderable(route: Route, request: Request) -> bool:
    """Return whether ids would say all of a prompt: one text or one chat of text, for the model itself, of some length.

    Engines name the blocks of an adapter, an image or a sound by more than ids.
    """
    if len(request.body) < LEAST_BYTES or not request.splittable or request.adapter:
        return False
    if route is Route.COMPLETIONS:
        return memoryview(request.fields["prompt"])[0] == _QUOTE
    messages = request.fields.get("messages")
    return messages is not None and _OTHER_PART.search(messages) is None


class Rendered(msgspec.Struct, frozen=True):
    """What a renderer said of a prompt."""

    ids: list[int]
    #: The same as JSON.
    text: bytes


class _Answer(msgspec.Struct):
    token_ids: msgspec.Raw
    #: What is not text in a prompt.
    features: msgspec.Raw = msgspec.Raw(b"null")


_answer = msgspec.json.Decoder(_Answer | list[_Answer]).decode


def read_rendered(body: bytes) -> Rendered | None:
    """Read a renderer's answer (vLLM 0.32: an object for a chat, a list for a completion); None: it says no use."""
    try:
        found = _answer(body)
        if isinstance(found, list):
            (found,) = found
        ids = token_ids(found.token_ids)
    except (msgspec.DecodeError, ValueError):
        return None
    return Rendered(ids, bytes(found.token_ids)) if ids and bytes(found.features) == b"null" else None


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Read(msgspec.Struct):
    prompt_token_ids: list[int] | None = None
    choices: list[_Choice] = []


_read = msgspec.json.Decoder(_Read).decode
_COUNT: Final = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')


def tokens_read(answer: bytes) -> list[int] | None:
    """Return the prompt's ids as an engine read them, by its answer to ``return_token_ids``; None: it does not say."""
    try:
        found = _read(answer)
    except msgspec.DecodeError:
        return None
    return found.prompt_token_ids or next((choice.prompt_token_ids for choice in found.choices), None)


def count_read(tail: bytes) -> int | None:
    """Return how many prompt tokens an engine counted, by the ``usage`` in the last bytes of its answer; None: no word.

    Inside a text the quotes of such a field are escaped.
    """
    found = _COUNT.findall(tail)
    return int(found[-1]) if found else None


class Gain:
    """What renders cost and bring, as far as was seen. Times in seconds."""

    def __init__(self) -> None:
        self._per_byte = _PER_BYTE
        #: Share of what was at stake that ids saved.
        self.share = _HOPE

    def expected(self, size: int) -> float:
        """Return how long the render of a body of ``size`` bytes takes."""
        return _SETUP + self._per_byte * size

    def patience(self, size: int) -> float:
        """Return how long such a render is waited for."""
        return max(_PATIENCE, 2 * self.expected(size))

    def took(self, size: int, seconds: float) -> None:
        """A render took ``seconds``; one that was given up took at least that."""
        self._per_byte += _WEIGHT * (max(0.0, seconds - _SETUP) / size - self._per_byte)

    def brought(self, share: float) -> None:
        """Ids saved this share of what was at stake."""
        self.share += _WEIGHT * (min(max(share, 0.0), 1.0) - self.share)

    def worth(self, size: int, stake: float) -> bool:
        """Return whether ids are expected to save more than their render takes, with ``stake`` seconds to be saved."""
        if stake * self.share > self.expected(size):
            return True
        if stake > 0:
            self.share += _FADE * (_HOPE - self.share)
            self._per_byte += _FADE * (_PER_BYTE - self._per_byte)
        return False


class Trust:
    """How far engines read what the renderer says. Times in seconds on the caller's clock."""

    def __init__(self) -> None:
        self._agreed = 0
        self._asked = 0
        self._until = 0.0

    def lost(self, now: float) -> bool:
        """Return whether engines read other tokens lately, so that nothing is rendered."""
        return now < self._until

    def checks(self) -> bool:
        """Return whether the next ids are left to the engine to find by itself, for comparison."""
        self._asked += 1
        return self._agreed < ENOUGH or self._asked % CHECKED_EACH == 0

    def judge(self, same: bool, now: float) -> None:
        """An engine read the same tokens, or others."""
        self._agreed = self._agreed + 1 if same else 0
        if not same:
            self._until = now + DISTRUST_SECONDS

    def renew(self) -> None:
        """The renderers are others now: nothing is known of them."""
        self._agreed, self._until = 0, 0.0
