"""The first server-sent event of an answer, looked at before the answer is passed on.

An engine says status 200 when it starts to work and may fail before the first token, most often because the KV of a
handoff did not arrive. Its error then is the stream's first event. A client must get it with an honest status, and a
request of which nothing was answered yet may be tried again; so a stream's head waits for its first event.
"""

from __future__ import annotations

from typing import Final

import msgspec

_BEGINNINGS: Final = (b'data: {"error"', b'data:{"error"')
_LONGEST_BEGINNING: Final = max(map(len, _BEGINNINGS))
_LONGEST_SIZE_LINE: Final = 64
#: An error event that is longer is passed on as it is.
_LONGEST_EVENT: Final = 64 * 1024


class HiddenError(msgspec.Struct, frozen=True):
    """An engine's error inside a stream: the status that it means, and its JSON as the engine wrote it."""

    status: int
    body: bytes


class _Error(msgspec.Struct):
    code: object = None


class _Event(msgspec.Struct):
    error: _Error


_event = msgspec.json.Decoder(_Event).decode


def harmless(data: bytes) -> bool:
    """Whether ``data``, the first bytes of a chunked body, show already that it begins with no error: nearly always."""
    start = data.find(b"\r\n") + 2
    return start > 1 and len(data) - start >= _LONGEST_BEGINNING and not data.startswith(_BEGINNINGS, start)


def undecided(data: bytes) -> bool:
    """Whether more than ``data``, the first bytes of a chunked body, is needed to tell how the stream begins."""
    size_end = data.find(b"\r\n")
    if size_end < 0:
        return len(data) < _LONGEST_SIZE_LINE
    start = size_end + 2
    if data.startswith(_BEGINNINGS, start):
        return data.find(b"\n\n", start) < 0 and len(data) - start < _LONGEST_EVENT
    # Nearly all streams end here, without a copy.
    return len(data) - start < _LONGEST_BEGINNING and any(
        beginning.startswith(data[start:]) for beginning in _BEGINNINGS
    )


def hidden_error(data: bytes) -> HiddenError | None:
    """Return the error that a chunked body's first event is, or None when it is none."""
    start = data.find(b"\r\n") + 2
    if not data.startswith(_BEGINNINGS, start):
        return None
    body = data[start + 5 : data.find(b"\n\n", start)].strip()
    try:
        code = _event(body).error.code
    except msgspec.DecodeError:
        return None
    honest = isinstance(code, int) and 400 <= code <= 599
    return HiddenError(code if honest else 500, body)  # type: ignore[arg-type]
