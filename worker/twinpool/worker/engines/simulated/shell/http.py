"""HTTP/1.1 with keep-alive and streaming, on asyncio's protocol interface and httptools.

One request of a connection is served at a time; a connection that closes tells its request at once. What a client can
make us hold is bounded: headers, body, and no more pipelined requests than arrive in one read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import httptools

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_HEADER_BYTES = 64 * 1024

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}

JSON_TYPE = "application/json"


@dataclass(slots=True)
class Request:
    """One request, complete. Header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    keep_alive: bool = True


class Exchange:
    """A request and the way to answer it: :meth:`respond`, or :meth:`open_stream`, :meth:`send` and :meth:`close`."""

    def __init__(self, request: Request, connection: Connection) -> None:
        self.request = request
        self._connection = connection
        #: Called once when the client leaves before the answer is complete.
        self.on_gone: Callable[[], None] | None = None

    def respond(self, status: int, body: bytes, content_type: str = JSON_TYPE, extra: str = "") -> None:
        """Send a whole answer."""
        head = self._head(status, content_type, f"content-length: {len(body)}\r\n{extra}")
        self._connection.write(head + (b"" if self.request.method == "HEAD" else body))
        self._connection.done(self)

    def open_stream(self, content_type: str, extra: str = "") -> None:
        """Start an answer whose length is not known."""
        self._connection.write(self._head(200, content_type, f"transfer-encoding: chunked\r\n{extra}"))

    def send(self, data: bytes) -> None:
        """Send a part of a stream."""
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))

    def close(self) -> None:
        """Complete a stream."""
        self._connection.write(b"0\r\n\r\n")
        self._connection.done(self)

    def reset(self) -> None:
        """Reset the connection: the client sees a broken one, not an orderly end."""
        self._connection.reset()

    def _head(self, status: int, content_type: str, extra: str) -> bytes:
        connection = "" if self.request.keep_alive else "connection: close\r\n"
        line = f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\n"
        kind = f"content-type: {content_type}\r\n" if content_type else ""
        return f"{line}server: twinpool-simulated\r\n{kind}{extra}{connection}\r\n".encode()


class Connection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, handle: Callable[[Exchange], None], connections: set[Connection], max_body: int) -> None:
        self._handle = handle
        self._connections = connections
        self._max_body = max_body
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._current: Exchange | None = None
        self._queue: deque[Request] = deque()
        self._request = Request("", "")
        self._body = bytearray()
        self._header_bytes = 0
        self._closing = False
        self._deaf = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        # uvloop's transports do not derive from asyncio's classes
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        """Tell the request that runs that its client is gone."""
        self._transport = None
        self._connections.discard(self)
        self._queue.clear()
        current, self._current = self._current, None
        if current is not None and current.on_gone is not None:
            current.on_gone()

    def data_received(self, data: bytes) -> None:
        """Parse what came in."""
        if self._closing or self._deaf:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True  # the request was taken as it is; what follows it is of another protocol
        except httptools.HttpParserError as error:
            if not self._closing:
                self._refuse(400, f"not HTTP/1.1: {error}")

    # httptools

    def on_message_begin(self) -> None:
        """Start a request."""
        self._request = Request("", "")
        self._body.clear()
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        self._count(url)
        self._request.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header."""
        self._count(name + value)
        self._request.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Invite the body of a client that waits for it."""
        if self._request.headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        if not self._closing:
            self._body += data
            if len(self._body) > self._max_body:
                self._refuse(413, f"the body is larger than {self._max_body} bytes")

    def on_message_complete(self) -> None:
        """Serve the request, or queue it behind the one that runs."""
        if self._closing:
            return
        request = self._request
        request.method = self._parser.get_method().decode("ascii")
        request.path = request.path.partition("?")[0]
        request.body = bytes(self._body)
        request.keep_alive = self._parser.should_keep_alive() and not self._parser.should_upgrade()
        self._body.clear()
        self._queue.append(request)
        if self._current is None:
            self._next()
        elif self._transport is not None:
            self._transport.pause_reading()

    def _count(self, data: bytes) -> None:
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES and not self._closing:
            self._refuse(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes")

    # What exchanges call

    def write(self, data: bytes) -> None:
        """Send bytes; nothing happens once the client is gone."""
        if self._transport is not None:
            self._transport.write(data)

    def done(self, exchange: Exchange) -> None:
        """An answer is complete: close, or serve the next request."""
        if exchange is not self._current:
            return
        self._current = None
        if not exchange.request.keep_alive:
            self.shut()
        else:
            self._next()

    def shut(self) -> None:
        """Close the connection after what was written."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Close the connection with a TCP reset."""
        self._closing = True
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def idle(self) -> bool:
        """Return whether no request runs here."""
        return self._current is None

    def _next(self) -> None:
        if self._queue and self._transport is not None:
            self._current = Exchange(self._queue.popleft(), self)
            self._handle(self._current)
            if not self._queue and not self._closing:
                self._transport.resume_reading()

    def _refuse(self, status: int, problem: str) -> None:
        """Answer what cannot be served and close; a request that runs is aborted, since framing is lost."""
        self._closing = True
        body = f'{{"error":{{"message":"{problem}","type":"BadRequestError","param":null,"code":{status}}}}}'
        request = Request("POST", "", keep_alive=False)
        if self._current is None:
            Exchange(request, self).respond(status, body.replace("\\", "/").encode())
        self.shut()
