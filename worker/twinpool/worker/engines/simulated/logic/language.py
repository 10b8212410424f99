"""The invented language: a reversible tokenizer and a next token that depends on every token before it.

The *state* of a token sequence is a chain over its ids, and stands for the KV cache's content: whoever holds the state
of a prompt continues it in exactly one way, and whoever holds another one answers differently. It follows that

* a prefill/decode pair answers like a single instance if and only if the right KV was handed over, and
* a prompt with the first part of its answer appended is continued by the rest of that answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PRIME = (1 << 61) - 1
_FACTOR = 0x9E3779B97F4A7C1

#: State of the empty sequence.
EMPTY = 1

_DETERMINERS = "The A Every This Each One That Another"
_ADJECTIVES = (
    "quiet early careful green distant patient small bright steady warm narrow honest simple heavy quick "
    "ancient gentle modern silver clever famous hidden lucky northern open plain rapid soft tall useful wooden "
    "young"
)
_NOUNS = (
    "river engine letter garden window teacher mountain answer machine harbour question bridge market forest "
    "story city captain library lantern orchard painter signal station valley village wheel winter compass "
    "island kitchen meadow road"
)
_VERBS = (
    "carries follows remembers builds crosses finds guards holds invites joins keeps leads meets needs offers "
    "paints reaches repairs saves shapes shares shows teaches tells trusts visits warms watches welcomes "
    "describes explains moves"
)


def _words(text: str) -> list[str]:
    return [f" {word}" for word in text.split()]


_LOWER_DETERMINERS = [word.lower() for word in _words(_DETERMINERS)]
#: Words by their place in a sentence; a word stands in one place only, so that the last token tells where it is.
_CLASSES: dict[str, list[str]] = {
    "start": _words(_DETERMINERS),
    "adjective": _words(_ADJECTIVES)[::2],
    "subject": _words(_NOUNS)[::2],
    "verb": _words(_VERBS),
    "determiner": _LOWER_DETERMINERS,
    "object adjective": _words(_ADJECTIVES)[1::2],
    "object": _words(_NOUNS)[1::2],
    "end": ["."],
    "capital": [" Paris"],
    "eos": ["<|end|>"],
}
#: What follows each place; whatever is not of this language is followed by a new sentence.
_FOLLOWS: dict[str, str] = {
    "start": "adjective",
    "adjective": "subject",
    "subject": "verb",
    "verb": "determiner",
    "determiner": "object adjective",
    "object adjective": "object",
    "object": "end",
    "capital": "end",
    "end": "start",
    "eos": "start",
}
#: After one sentence in this many the answer ends.
_SENTENCES = 4

# Ids: one to three bytes of UTF-8 first, then the vocabulary.
_TWO, _THREE = 1 << 8, (1 << 8) + (1 << 16)
_FIRST_WORD = _THREE + (1 << 24)
_VOCABULARY = [word for members in _CLASSES.values() for word in members]
_IDS = {word: _FIRST_WORD + index for index, word in enumerate(_VOCABULARY)}
_PLACE_OF = {_IDS[word]: name for name, members in _CLASSES.items() for word in members}
_PLACE_IDS = {name: [_IDS[word] for word in members] for name, members in _CLASSES.items()}
VOCABULARY_SIZE = _FIRST_WORD + len(_VOCABULARY)

_PIECES = re.compile(r" ?[A-Za-z]+|\.|[^A-Za-z .]+| +")


def encode(text: str, limit: int | None = None) -> list[int]:
    """Return the token ids of ``text``: words of the vocabulary are one token, all else three bytes a token.

    Encoding stops once there are more ids than ``limit``, so that a text that is too long costs no more than one that
    is not.
    """
    ids: list[int] = []
    for match in _PIECES.finditer(text):
        if limit is not None and len(ids) > limit:
            break
        piece = match.group()
        known = _IDS.get(piece)
        if known is None:
            ids.extend(_byte_ids(_head(piece, limit).encode("utf-8", "surrogatepass")))
        else:
            ids.append(known)
    return ids


def _head(piece: str, limit: int | None) -> str:
    """Return as much of a piece as can matter: more than three times ``limit`` bytes are more than ``limit`` ids."""
    return piece if limit is None else piece[: 3 * limit + 3]


def _byte_ids(data: bytes) -> Iterable[int]:
    for start in range(0, len(data), 3):
        chunk = data[start : start + 3]
        yield int.from_bytes(chunk, "big") + (0, _TWO, _THREE)[len(chunk) - 1]


def decode(ids: Iterable[int]) -> str:
    """Return the text of ``ids``; bytes that are not UTF-8 become replacement characters."""
    return b"".join(map(token_bytes, ids)).decode("utf-8", "replace")


def token_bytes(token: int) -> bytes:
    """Return the bytes of one token.

    Raises
    ------
    ValueError
        When there is no such token.
    """
    if not 0 <= token < VOCABULARY_SIZE:
        raise ValueError(f"token id {token} is out of vocabulary [0, {VOCABULARY_SIZE})")
    if token == EOS:
        return b""
    if token >= _FIRST_WORD:
        return _VOCABULARY[token - _FIRST_WORD].encode()
    if token >= _THREE:
        return (token - _THREE).to_bytes(3, "big")
    if token >= _TWO:
        return (token - _TWO).to_bytes(2, "big")
    return token.to_bytes(1, "big")


def advance(state: int, ids: Iterable[int]) -> int:
    """Return the state after ``ids``; advancing in parts or at once comes to the same."""
    for token in ids:
        state = (state * _FACTOR + token + 1) % _PRIME
    return state


def mixed(state: int) -> int:
    """Return 64 well-mixed bits of a state (the finalizer of splitmix64)."""
    value = state
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


EOS = _IDS["<|end|>"]
_PARIS = _IDS[" Paris"]
_ASKS_FOR_PARIS = re.compile(r"capital\s+of\s+france(?!.*\bParis\b)", re.IGNORECASE | re.DOTALL)
#: How many of a prompt's last tokens are searched for the one question whose answer is known.
_ASKED_WITHIN = 256


@dataclass(frozen=True, slots=True)
class Content:
    """What the KV of a sequence holds, and all that decides how it goes on.

    ``opening`` is the next token when the prompt asks for the capital of France, the demonstration's question.
    """

    state: int
    last: int
    before: int = -1
    opening: int | None = None

    @classmethod
    def of(cls, ids: Sequence[int]) -> Content:
        """Return the content of a prompt, which has at least one token."""
        asked = _ASKS_FOR_PARIS.search(decode(ids[-_ASKED_WITHIN:]))
        before = ids[-2] if len(ids) > 1 else -1
        return cls(advance(EMPTY, ids), ids[-1], before, _PARIS if asked else None)

    def after(self, token: int) -> Content:
        """Return the content with one more token."""
        return Content(advance(self.state, (token,)), token, self.last)

    def next_token(self, may_end: bool) -> int:
        """Return the token that follows; :data:`EOS` only when the answer ``may_end`` here."""
        if self.opening is not None:
            return self.opening
        bits = mixed(self.state)
        place = _PLACE_OF.get(self.last, "end")
        # Only a sentence of this language ends an answer: a prompt with a full stop does not get an empty one.
        spoken = place == "end" and _PLACE_OF.get(self.before) in ("object", "capital")
        if spoken and may_end and bits % _SENTENCES == 0:
            return EOS
        choices = _PLACE_IDS[_FOLLOWS[place]]
        return choices[(bits >> 8) % len(choices)]
