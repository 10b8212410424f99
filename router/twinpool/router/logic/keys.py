"""API keys: who a client is.

Keys are kept as SHA-256 digests, and looked up by a keyed hash of the digest whose secret is each process's own: how
long a look-up takes says nothing about the keys. Without a single key nobody is let in.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from twinpool.core.errors import InvalidValue
from twinpool.router.logic.errors import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twinpool.router.logic.headers import Header

#: Shorter ones can be guessed.
SHORTEST_KEY: Final = 16
_DIGEST_PREFIX: Final = b"sha256:"

UNKNOWN_KEY: Final = Refusal(
    401,
    "invalid_api_key",
    "This pool wants an API key that it knows: send 'Authorization: Bearer KEY'. Keys are the entries of the Secret in "
    "the pool's routing.auth.",
)


def digest_of(entry: bytes, name: str) -> bytes:
    """Return the SHA-256 digest that an entry of the Secret stands for: a key, or ``sha256:`` and its digest in hex.

    Raises
    ------
    InvalidValue
        When the entry is too short for a key or no digest; the message does not repeat it.
    """
    entry = entry.strip()
    if entry.startswith(_DIGEST_PREFIX):
        try:
            digest = bytes.fromhex(entry.removeprefix(_DIGEST_PREFIX).decode("ascii"))
        except ValueError:
            digest = b""
        if len(digest) != hashlib.sha256().digest_size:
            raise InvalidValue(f"API key {name!r} is no SHA-256 digest", "write sha256: and 64 hexadecimal digits")
        return digest
    if len(entry) < SHORTEST_KEY:
        raise InvalidValue(
            f"API key {name!r} has fewer than {SHORTEST_KEY} characters", "make one with 'openssl rand -hex 32'"
        )
    return hashlib.sha256(entry).digest()


class Keyring:
    """Names by key. ``entries`` are names and digests; ``secret`` is any 16 random bytes of this process."""

    def __init__(self, entries: Iterable[tuple[str, bytes]], secret: bytes) -> None:
        self._secret = secret
        self._names = {self._hidden(digest): name for name, digest in entries}
        #: Keys that were found, by themselves: Python hashes them with a secret of this process too.
        self._seen: dict[bytes, str] = {}

    def _hidden(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=16).digest()

    def name_of(self, headers: Sequence[Header]) -> str | None:
        """Return the name of the key in ``headers`` (names in lower case), or None when it is missing or unknown."""
        token = _token(tuple(headers))
        if token is None:
            return None
        name = self._seen.get(token)
        if name is None:
            name = self._names.get(self._hidden(hashlib.sha256(token).digest()))
            if name is not None:
                self._seen[token] = name
        return name


@lru_cache(maxsize=128)  # all requests of a client have the same headers
def _token(headers: tuple[Header, ...]) -> bytes | None:
    """Return the key that a client sent, as OpenAI's clients or as Anthropic's do; two different ones are none."""
    found = {
        value[7:].strip() if name == b"authorization" else value
        for name, value in headers
        if name == b"x-api-key" or (name == b"authorization" and value[:7].lower() == b"bearer ")
    }
    return found.pop() if len(found) == 1 else None
