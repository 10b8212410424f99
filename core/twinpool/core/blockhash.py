"""The names that engines give to blocks of the KV cache, computed outside of them.

vLLM names a full block by a hash chain over token ids: ``h = H((parent, tokens, extra))``, beginning with the hash of a
seed, and publishes the low 64 bits. With ``--prefix-caching-hash-algo sha256_cbor`` H is SHA-256 over canonical CBOR
(RFC 8949), which depends on no Python version or process (vLLM 0.32, ``v1/core/kv_cache_utils.py``; compared with its
events; an adapter's by its own function). Standard library only. Always true: equal tokens, salt and adapter, equal
names.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

#: vLLM's name of the algorithm, and the value of PYTHONHASHSEED, its seed, that all engines of a pool get. Without a
#: value some versions take a random one.
ALGORITHM: Final = "sha256_cbor"
SEED: Final = "0"

_TEXT, _ARRAY = 3, 4
_NULL: Final = b"\xf6"
_SHORT: Final = 2**64 - 1
#: Canonical heads of CBOR: longest value, lead, bytes.
_WIDTHS: Final = ((2**8, 24, 1), (2**16, 25, 2), (2**32, 26, 4), (2**64, 27, 8))


def _head(kind: int, value: int) -> bytes:
    """Return a CBOR head.

    Raises
    ------
    ValueError
        When ``value`` is negative or takes more than 64 bits.
    """
    if 0 <= value < 24:
        return bytes([kind << 5 | value])
    for limit, lead, size in _WIDTHS:
        if 0 <= value < limit:
            return bytes([kind << 5 | lead]) + value.to_bytes(size, "big")
    raise ValueError(f"{value} is no token id")


@lru_cache(maxsize=2**15)
def _token(value: int) -> bytes:
    return _head(0, value)


def _text(text: str) -> bytes:
    data = text.encode()
    return _head(_TEXT, len(data)) + data


#: What the first block of every prompt follows.
ROOT: Final = sha256(_text(SEED)).digest()


#: Name and path of a LoRA adapter, as ``--lora-modules`` has them.
Adapter = tuple[str, str]


def following(parent: bytes, tokens: Sequence[int], salt: str | None = None, adapter: Adapter | None = None) -> bytes:
    """Return the digest of the block of ``tokens`` after ``parent``.

    ``salt`` (``cache_salt``) is of a first block, ``adapter`` of every block that it computed.

    Raises
    ------
    ValueError
        When a token id is negative or takes more than 64 bits.
    """
    extra = _NULL
    if salt is not None or adapter is not None:
        keys = [] if adapter is None else [b"\x83" + _text("lora") + _text(adapter[0]) + _text(adapter[1])]
        keys += [] if salt is None else [b"\x82" + _text("cache_salt") + _text(salt)]
        extra = _head(_ARRAY, len(keys)) + b"".join(keys)
    ids = b"".join(map(_token, tokens))
    return sha256(b"\x83\x58\x20" + parent + _head(_ARRAY, len(tokens)) + ids + extra).digest()


def short(digest: bytes) -> int:
    """Return the 64 bits of a digest that engines publish."""
    return int.from_bytes(digest, "big") & _SHORT


def chain(
    tokens: Sequence[int], size: int, most: int, salt: str | None = None, adapter: Adapter | None = None
) -> list[int]:
    """Return the published names of the first ``most`` full blocks of ``size`` tokens.

    Raises
    ------
    ValueError
        When a token id is negative or takes more than 64 bits.
    """
    names = []
    parent = ROOT
    for start in range(0, min(len(tokens) // size, most) * size, size):
        parent = following(parent, tokens[start : start + size], None if start else salt, adapter)
        names.append(short(parent))
    return names
