"""Where an engine's HTTP/1.1 answer ends, without touching its bytes.

Strict on purpose: a router and an engine that disagree about the end of one answer would give a client the rest of it
as the next one. Anything out of the ordinary is a :class:`FramingError`, and the connection is not used again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from twinpool.core.errors import TwinpoolError

MAX_HEAD: Final = 64 * 1024
_MAX_SIZE_LINE: Final = 1024
_MAX_TRAILER: Final = 16 * 1024
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
# No control characters but tabs (RFC 9110, 5.5), which other parsers refuse or take for the end of something.
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [\t -~\x80-\xff]*)?\r\n")
_HEADER = re.compile(rb"(%b):[ \t]*([\t -~\x80-\xff]*?)[ \t]*\r\n" % _TOKEN)
_SIZE_LINE = re.compile(rb'([0-9A-Fa-f]{1,15})(?:;%b(?:=(?:%b|"[\t !#-\[\]-~\x80-\xff]*"))?)*' % (_TOKEN, _TOKEN))
_ONCE: Final = frozenset({b"content-length", b"transfer-encoding", b"content-type"})
#: Headers that concern one connection only.
_HOP_BY_HOP: Final = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"upgrade"})


#: Sizes of chunks by their size line, once it was found well-formed; the same few come again and again.
_SIZES: dict[bytes, int] = {}
#: How far it is from the end of one chunk's data to the next one's, by the bytes in between: CRLF, size line, CRLF.
_STEPS: dict[bytes, int] = {}
_MEMO_LINE: Final = 5
#: How nearly all chunked bodies end: the last chunk, and no trailers.
_LAST: Final = b"0\r\n\r\n"
_LAST_STEP: Final = len(b"\r\n" + _LAST)
_MEMO_SIZE: Final = 4096


class FramingError(TwinpoolError):
    """The engine's bytes are not the HTTP that Twinpool accepts."""


@dataclass(frozen=True, slots=True)
class Head:
    """The status line and headers of an answer."""

    status: int
    #: Bytes of the body; None when it is chunked or ends with the connection.
    length: int | None
    chunked: bool
    #: The body is a stream of server-sent events.
    events: bool
    #: The engine will keep the connection.
    keep_alive: bool
    #: The head as the client gets it, without the blank line: hop-by-hop headers left out, the rest untouched.
    passed: bytes
    has_request_id: bool


@lru_cache(maxsize=128)  # heads of one engine differ by little more than the second they were written in
def parse_head(head: bytes) -> Head:
    """Parse ``head``, which ends with the blank line.

    Raises
    ------
    FramingError
        When it is malformed or says two things about its length.
    """
    status_line = _STATUS_LINE.match(head)
    if status_line is None:
        raise FramingError("the engine's answer does not begin with an HTTP/1.1 status line")
    status, keep_alive = int(status_line.group(2)), status_line.group(1) == b"1"
    passed = [head[: status_line.end()]]
    position, end = status_line.end(), len(head) - 2
    found: dict[bytes, bytes] = {}
    while position < end:
        header = _HEADER.match(head, position)
        if header is None:
            raise FramingError("the engine sent a malformed header")
        name, value = header.group(1).lower(), header.group(2)
        position = header.end()
        if name in _HOP_BY_HOP:
            if name == b"connection" and b"close" in value.lower():
                keep_alive = False
            continue
        if name in found and name in _ONCE:
            raise FramingError(f"the engine sent {name.decode()} twice")
        found[name] = value
        passed.append(header.group())
    if position != end or not head.endswith(b"\r\n\r\n"):
        raise FramingError("the engine's answer has no blank line after its headers")
    length, chunked = _length(status, found)
    return Head(
        status=status,
        length=length,
        chunked=chunked,
        events=found.get(b"content-type", b"").lower().startswith(b"text/event-stream"),
        keep_alive=keep_alive,
        passed=b"".join(passed),
        has_request_id=b"x-request-id" in found,
    )


def _length(status: int, headers: dict[bytes, bytes]) -> tuple[int | None, bool]:
    """Return the body's length, None when the headers give none, and whether it is chunked."""
    encoding, size = headers.get(b"transfer-encoding"), headers.get(b"content-length")
    if encoding is not None and encoding.lower() != b"chunked":
        raise FramingError("the engine sent a Transfer-Encoding other than chunked")
    if size is not None and (encoding is not None or not size.isdigit() or len(size) > 15):
        raise FramingError("the engine sent a malformed Content-Length, or one beside Transfer-Encoding")
    if status in (204, 304) or status < 200:
        return 0, False
    return (None if size is None else int(size)), encoding is not None


def _passed(data: bytes, end: int, size: int) -> int:
    """Pass over chunks whose size line was seen before: nearly all of a stream. ``end`` is that of a chunk's data."""
    step_of, width = _STEPS.get, 6  # of a size with two digits
    while width:
        while step := step_of(data[end : end + width]):
            end += step
        width = _width(data[end : end + 8]) if size - end > _LAST_STEP else 0
    return end


def _width(between: bytes) -> int:
    """Return how many of the bytes after a chunk's data lead to the data of a chunk of known size; 0: none do."""
    for width in (6, 7, 5, 8):
        if between[:width] in _STEPS:
            return width
    return 0


class Body:
    """Finds the end of a body that arrives in pieces of any size."""

    __slots__ = ("_left", "_line", "_trailer", "chunked", "until_close")

    def __init__(self, head: Head) -> None:
        self.chunked = head.chunked
        self.until_close = not head.chunked and head.length is None
        #: Bytes to come: of the body, or of the present chunk with its CRLF.
        self._left = head.length or 0
        #: A partial size or trailer line; None while inside a chunk.
        self._line = b""
        self._trailer = -1

    def feed(self, data: bytes, start: int = 0) -> int:
        """Take ``data[start:]``; return the index at which the body ends, or -1 when more is to come.

        Raises
        ------
        FramingError
            When the chunk framing is wrong.
        """
        left, size = self._left, len(data)
        if not self.chunked:
            return self._feed_whole(start, size)
        if left == 1 or self._line or self._trailer >= 0:
            return self._feed_chunks(data, start)
        if not left:
            newline = data.find(b"\r\n", start, start + _MEMO_LINE + 2)
            known = _SIZES.get(data[start:newline]) if newline > 0 else None
            if known is None:
                return self._feed_chunks(data, start)
            start, left = newline + 2, known + 2
        end = start + left - 2  # of the chunk's data
        if size - end > _LAST_STEP:
            end = _passed(data, end, size)
        if end + 2 > size:
            position = end if end < size else size  # noqa: FURB136 - a call of min costs as much as the rest
            self._left = end + 2 - position
            return -1 if position == size else self._feed_chunks(data, position)
        if data[end : end + 2] != b"\r\n":
            raise FramingError("the engine's chunk is longer than its size says")
        self._left = 0
        if size == end + 2:
            return -1
        return size if size - end == _LAST_STEP and data.endswith(_LAST) else self._feed_chunks(data, end + 2)

    def _feed_whole(self, start: int, size: int) -> int:
        """See :meth:`feed`, of a body that is not chunked."""
        if self.until_close:
            return -1
        if size - start < self._left:
            self._left -= size - start
            return -1
        end = start + self._left
        self._left = 0
        return end

    def fill(self) -> bytes | None:
        """Return what completes the present chunk with blank lines, or None when the framing cannot be completed.

        Only a chunked body can be continued with something of ours.
        """
        if not self.chunked or self._line or self._trailer >= 0 or self._left > 65536:
            return None
        if self._left == 1:
            return b"\n"
        return b"\n" * (self._left - 2) + b"\r\n" if self._left else b""

    def _feed_chunks(self, data: bytes, position: int) -> int:
        """Go on with care: with a size line that is new or came in pieces, or a trailer."""
        size = len(data)
        while True:
            if self._left:
                position = self._skip(data, position)
                if self._left:
                    return -1
            if position == size:
                return -1
            newline = data.find(b"\n", position)
            stop = size if newline < 0 else newline + 1
            line = self._line + data[position:stop]
            if len(line) > _MAX_SIZE_LINE:
                raise FramingError("the engine sent a chunk-size or trailer line without end")
            position = stop
            if newline < 0:
                self._line = line
                return -1
            self._line = b""
            if not line.endswith(b"\r\n"):
                raise FramingError("the engine ended a chunk-size or trailer line without CRLF")
            if self._trailer < 0:
                self._size_line(line[:-2])
            elif line == b"\r\n":
                return position
            else:
                self._trailer_line(line)

    def _skip(self, data: bytes, position: int) -> int:
        """Pass over the present chunk and check the CRLF after it."""
        take = min(len(data) - position, self._left)
        before = self._left
        self._left -= take
        position += take
        if self._left < 2:
            # Bytes of the CRLF that are in this piece: its last one, two, or (when split) the first.
            seen = min(2 - self._left, take) if before > 1 else 1
            first = 0 if before > 1 else 1
            if data[position - seen : position] != b"\r\n"[first : first + seen]:
                raise FramingError("the engine's chunk is longer than its size says")
        return position

    def _trailer_line(self, line: bytes) -> None:
        if _HEADER.fullmatch(line) is None:
            raise FramingError("the engine sent a malformed trailer")
        self._trailer += len(line)
        if self._trailer > _MAX_TRAILER:
            raise FramingError("the engine sent too many trailers")

    def _size_line(self, line: bytes) -> None:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise FramingError("the engine sent a malformed chunk size")
        size = int(match.group(1), 16)
        if size:
            self._left = size + 2
            if len(line) <= _MEMO_LINE and len(_SIZES) < _MEMO_SIZE:
                _SIZES[line] = size
                _STEPS[b"\r\n%b\r\n" % line] = len(line) + 4 + size
        else:
            self._trailer = 0


def unchunk(body: bytes) -> bytes:
    """Return the payload of a complete chunked body that :class:`Body` has accepted."""
    pieces: list[bytes] = []
    position = 0
    while True:
        newline = body.index(b"\r\n", position)
        size = int(body[position:newline].split(b";")[0], 16)
        if not size:
            return b"".join(pieces)
        position = newline + 2 + size
        pieces.append(body[newline + 2 : position])
        position += 2
