"""Which of a client's headers reach an engine, and the request id that both legs carry."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

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
#: What lets a client in here is no engine's business.
_TRACEPARENT: Final = b"traceparent"
_KEYS: Final = frozenset({b"authorization", b"x-api-key"})


class Forwarded(NamedTuple):
    """Header lines (each with CRLF) for the two legs; ``X-Request-Id`` is among them."""

    request_id: bytes
    prefill: bytes
    decode: bytes
    #: The client's ``traceparent``, which the legs have not among their lines where this router traces.
    traceparent: bytes = b""


def forward(headers: Sequence[Header], new_id: bytes, *, hide_keys: bool = False, traces: bool = False) -> Forwarded:
    """Return what to send on of ``headers`` (names in lower case); ``new_id`` stands in for an id that is not sane.

    ``hide_keys`` says that the client's API key was for this router, ``traces`` that it says itself whose child an
    engine's span is.
    """
    request_id, hop_names = new_id, _OURS | _KEYS if hide_keys else _OURS
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            request_id = value
        elif name == b"connection":
            named = {token.strip().lower() for token in value.split(b",")}
            # Content-Type could be named too, which would change what the engine understands.
            hop_names = hop_names | (named - {b"content-type", b"authorization"})
    line = b"X-Request-Id: " + request_id + b"\r\n"
    prefill, decode, traceparent = [line], [line], b""
    for name, value in headers:
        if name in hop_names or name.startswith(_GUARDED_PREFIXES):
            continue
        if traces and name == _TRACEPARENT:
            # Two of them say nothing (W3C Trace Context, 3.2.1).
            traceparent = b"" if traceparent else value
            continue
        line = name + b": " + value + b"\r\n"
        decode.append(line)
        if name not in _NOT_FOR_PREFILL:
            prefill.append(line)
    return Forwarded(request_id, b"".join(prefill), b"".join(decode), traceparent)
