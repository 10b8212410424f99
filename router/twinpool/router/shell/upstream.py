"""Keep-alive connections to engines: one leg at a time on each, reused only while their framing is beyond doubt.

Only addresses of the pool's endpoints are dialled; nothing that a client or an engine says adds one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

from twinpool.router.logic.framing import MAX_HEAD, Body, FramingError, Head, parse_head

if TYPE_CHECKING:
    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.settings import Limits


#: A body up to this many bytes is copied behind its head, which is cheaper than a second buffer.
_JOIN_BELOW = 16 * 1024


class Leg(Protocol):
    """Who waits for an engine's answer. Exactly one of ``on_end`` and ``on_lost`` ends it, unless the leg aborts."""

    def on_head(self, head: Head) -> None:
        """The answer begins."""

    def on_body(self, data: bytes) -> None:
        """A piece of the answer, framing included; it follows every head at once, empty when nothing came yet."""

    def on_end(self) -> None:
        """The answer is complete; the connection is no longer this leg's."""

    def on_lost(self, fill: bytes | None) -> None:
        """The answer will not be completed; ``fill`` is what would complete its present chunk, if that can be done."""


class Upstream(asyncio.Protocol):
    """One connection to one engine."""

    __slots__ = (
        "_body",
        "_buffer",
        "_host",
        "_keep",
        "_leg",
        "_owner",
        "endpoint",
        "idle_since",
        "paused",
        "transport",
    )

    def __init__(self, owner: Connections, endpoint: Endpoint) -> None:
        self._owner = owner
        self.endpoint = endpoint
        self._host = b" HTTP/1.1\r\nHost: %b:%d\r\nContent-Length: " % (endpoint.host.encode(), endpoint.port)
        self.transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.idle_since = 0.0
        self._leg: Leg | None = None
        self._body: Body | None = None
        self._buffer = b""
        self._keep = True
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep dead peers from holding a request for ever: unanswered keep-alive probes end the connection."""
        self.transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000)

    def send(self, leg: Leg, head: tuple[bytes, bytes], body: bytes) -> None:
        """Send a request with the target and the header lines of ``head``; its answer goes to ``leg``."""
        self._leg = leg
        self._body = None
        self._buffer = b""
        target, lines = head
        size = len(body)
        if size < _JOIN_BELOW:
            self.transport.write(b"POST %b%b%d\r\n%b\r\n%b" % (target, self._host, size, lines, body))
        else:
            self.transport.writelines((b"POST %b%b%d\r\n%b\r\n" % (target, self._host, size, lines), body))

    def abort(self) -> None:
        """Close at once; nothing more is reported to the leg."""
        self._leg = None
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Pass an answer's bytes to the leg and find its end."""
        leg, body = self._leg, self._body
        if leg is None:
            self.transport.abort()
            return
        start, begins = 0, body is None
        try:
            if body is None:
                data, start = self._take_head(leg, data)
                body = self._body
                if self._leg is not leg or body is None:
                    return
            end = body.feed(data, start)
        except FramingError:
            self._lose(None)
            return
        if end < 0:
            leg.on_body(data[start:] if start else data)
            return
        if end > start or begins:
            leg.on_body(data if start == 0 and end == len(data) else data[start:end])
            if self._leg is not leg:
                return
        self._complete(reusable=self._keep and end == len(data))

    def _take_head(self, leg: Leg, data: bytes) -> tuple[bytes, int]:
        """Collect the head and report it; return the data and where its body begins."""
        data = self._buffer + data if self._buffer else data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end == 3:
                if len(data) > MAX_HEAD:
                    raise FramingError("the engine's headers have no end")
                self._buffer = data
                return data, len(data)
            head = parse_head(data[:end])
            if head.status >= 200:
                self._keep = head.keep_alive
                self._body = Body(head)
                leg.on_head(head)
                return data, end
            data = data[end:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the leg's end: a body without a length ends with an orderly close."""
        self._owner.forget(self)
        if self._leg is not None:
            if exc is None and self._body is not None and self._body.until_close:
                self._complete(reusable=False)
            else:
                self.give_up()

    def give_up(self) -> None:
        """Close at once and tell the leg that its answer will not be completed."""
        self._lose(self._body.fill() if self._body is not None else None)

    def _complete(self, reusable: bool) -> None:
        leg, self._leg = cast("Leg", self._leg), None
        if reusable:
            if self.paused:  # by the end of this answer, for a client that takes it slowly
                self.resume_reading()
            self._owner.give_back(self)
        else:
            self.transport.close()
        leg.on_end()

    def _lose(self, fill: bytes | None) -> None:
        leg, self._leg = cast("Leg", self._leg), None
        self.transport.abort()
        leg.on_lost(fill)

    def pause_reading(self) -> None:
        """Take nothing more from the engine until :meth:`resume_reading`."""
        self.paused = True
        self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on reading."""
        self.paused = False
        if not self.transport.is_closing():
            self.transport.resume_reading()


class Connections:
    """Idle connections by endpoint id."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: Limits) -> None:
        self._loop = loop
        self._limits = limits
        self._idle: dict[str, deque[Upstream]] = {}

    def take(self, endpoint: Endpoint) -> Upstream | None:
        """Return an idle connection, the one used last, or None."""
        idle = self._idle.get(endpoint.id)
        oldest = self._loop.time() - self._limits.upstream_idle
        while idle:
            connection = idle.pop()
            if connection.transport.is_closing():
                continue
            if connection.idle_since >= oldest:
                return connection
            connection.transport.close()
        return None

    async def connect(self, endpoint: Endpoint) -> Upstream | None:
        """Open a connection, or return None when the endpoint does not take one in time."""
        try:
            async with asyncio.timeout(self._limits.connect_timeout):
                _, upstream = await self._loop.create_connection(
                    lambda: Upstream(self, endpoint), endpoint.host, endpoint.port
                )
        except OSError:  # TimeoutError is one
            return None
        return upstream

    def give_back(self, upstream: Upstream) -> None:
        """Keep a connection for the next leg."""
        idle = self._idle.setdefault(upstream.endpoint.id, deque())
        upstream.idle_since = self._loop.time()
        idle.append(upstream)
        if len(idle) > self._limits.upstream_idle_connections:
            idle.popleft().transport.close()

    def forget(self, upstream: Upstream) -> None:
        """Drop a connection that is gone."""
        idle = self._idle.get(upstream.endpoint.id)
        if idle:
            with contextlib.suppress(ValueError):
                idle.remove(upstream)

    def sweep(self, known: frozenset[str] | set[str]) -> None:
        """Close connections that idled too long and those of endpoints that are gone."""
        oldest = self._loop.time() - self._limits.upstream_idle
        for endpoint, idle in list(self._idle.items()):
            while idle and (endpoint not in known or idle[0].idle_since < oldest):
                idle.popleft().transport.close()
            if not idle:
                del self._idle[endpoint]

    def idle(self) -> dict[str, int]:
        """Return how many idle connections each endpoint has."""
        return {endpoint: len(idle) for endpoint, idle in self._idle.items()}

    def close(self) -> None:
        """Close every idle connection."""
        self.sweep(frozenset())
