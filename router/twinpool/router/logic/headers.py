"""Which of a client's headers reach an engine, and the request id that both legs carry."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Header = tuple[bytes, bytes]

_REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}")

#: About one connection (RFC 9110, 7.6.1), or written anew for each leg.
_OURS: Final = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"expect", b"host", b"content-length", b"x-request-id",
})  # fmt: skip
#: A client must choose neither the rank inside a worker nor the peer of a handoff.
_GUARDED_PREFIXES: Final = (b"x-data-parallel-", b"x-prefiller-", b"x-kv-")
#: The prefill leg's answer is read here, not by the client.
_NOT_FOR_PREFILL: Final = frozenset({b"accept-encoding"})
_TRACEPARENT: Final = b"traceparent"
_SESSION: Final = b"x-session-id"
#: Headers that differ from request to request. The others of a client do not, so what they mean is found once.
VARYING: Final = frozenset({b"content-length", b"x-request-id", _TRACEPARENT, b"tracestate", _SESSION})
#: What lets a client in here is no engine's business.
_KEYS: Final = frozenset({b"authorization", b"x-api-key"})
_OURS_AND_KEYS: Final = _OURS | _KEYS


class Forwarded(msgspec.Struct, frozen=True):
    """Header lines (each with CRLF) for the two legs; ``X-Request-Id`` is among them."""

    request_id: bytes
    prefill: bytes
    decode: bytes
    #: The client's ``traceparent``, which the legs have not among their lines where this router traces.
    traceparent: bytes = b""
    #: What the client calls its session, if it does.
    session: bytes = b""


class _Lines(msgspec.Struct, frozen=True):
    """What becomes of headers that a client sends again and again: lines for the two legs."""

    prefill: bytes
    decode: bytes
    #: Names that concern this connection only.
    hop_names: frozenset[bytes]


def forward(
    headers: Sequence[Header],
    new_id: bytes,
    own: Iterable[Header] | None = None,
    *,
    hide_keys: bool = False,
    traces: bool = False,
) -> Forwarded:
    """Return what to send on of ``headers`` (names in lower case); ``new_id`` stands in for an id that is not sane.

    ``own`` are those with a name in :data:`VARYING`, if they stand apart already. ``hide_keys`` says that the client's
    API key was for this router, ``traces`` that it says itself whose child an engine's span is.
    """
    if own is None:
        own = [pair for pair in headers if pair[0] in VARYING]
        headers = [pair for pair in headers if pair[0] not in VARYING]
    lines = _lines(tuple(headers), hide_keys)
    request_id, more, parents, session = new_id, b"", [], b""
    for name, value in own:
        if name == b"x-request-id":
            if _REQUEST_ID.fullmatch(value):
                request_id = value
        elif name not in lines.hop_names:
            if traces and name == _TRACEPARENT:
                parents.append(value)
            else:
                more += b"%b: %b\r\n" % (name, value)
                session = value if name == _SESSION else session
    more += b"X-Request-Id: %b\r\n" % request_id
    # Two of them say nothing (W3C Trace Context, 3.2.1).
    traceparent = parents[0] if len(parents) == 1 else b""
    return Forwarded(request_id, more + lines.prefill, more + lines.decode, traceparent, session)


@lru_cache(maxsize=128)  # clients could send headers without end
def _lines(headers: tuple[Header, ...], hide_keys: bool) -> _Lines:
    hop_names = _OURS_AND_KEYS if hide_keys else _OURS
    for name, value in headers:
        if name == b"connection":
            named = {token.strip().lower() for token in value.split(b",")}
            # Content-Type could be named too, which would change what the engine understands.
            hop_names = hop_names | (named - {b"content-type", b"authorization"})
    passed = [pair for pair in headers if pair[0] not in hop_names and not pair[0].startswith(_GUARDED_PREFIXES)]
    decode = b"".join([b"%b: %b\r\n" % pair for pair in passed])
    prefill = b"".join([b"%b: %b\r\n" % pair for pair in passed if pair[0] not in _NOT_FOR_PREFILL])
    return _Lines(prefill, decode, hop_names)
