"""Probes every wanted endpoint's ``/health`` and says when the router's opinion of one changes.

Of an engine that has begun to answer it also reads once, from ``/metrics``, how much KV it can hold.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from twinpool.router.logic.health import Health, Probe, judge
from twinpool.router.logic.kv_room import kv_tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from twinpool.router.logic.endpoints import Endpoint

#: Long, because a probe that comes late proves nothing and only occupies the engine.
_TIMEOUT = 5.0
#: The most that is read of an engine's metrics, several times what vLLM writes.
_MOST_BYTES = 4 * 2**20
#: How often an engine that begins to answer is asked for its metrics before it is left alone.
_QUESTIONS = 3


class Prober:
    """One task per wanted endpoint. ``changed`` is called when :meth:`admitted` has a new answer for some endpoint."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._health: dict[str, Health] = {}
        self._room: dict[str, int] = {}

    def admitted(self, endpoint: str) -> bool:
        """Whether the endpoint with this id answers."""
        return self._health.get(endpoint, Health()).admitted

    def losses(self, endpoint: str) -> int:
        """How often the endpoint with this id stopped answering."""
        return self._health.get(endpoint, Health()).losses

    def kv_tokens(self, endpoint: str) -> int:
        """How many tokens' KV the endpoint with this id can hold; 0 while it is not known."""
        return self._room.get(endpoint, 0)

    def watch(self, endpoints: Iterable[Endpoint]) -> None:
        """Probe these endpoints from now on, and no others."""
        wanted = {endpoint.id: endpoint for endpoint in endpoints}
        for identity in self._tasks.keys() - wanted.keys():
            self._tasks.pop(identity).cancel()
            self._health.pop(identity, None)
            self._room.pop(identity, None)
        for identity in wanted.keys() - self._tasks.keys():
            self._tasks[identity] = asyncio.ensure_future(self._follow(wanted[identity]))

    def close(self) -> None:
        """Stop probing."""
        self.watch(())

    async def _follow(self, endpoint: Endpoint) -> None:
        questions = 0
        while True:
            before = self._health.get(endpoint.id, Health())
            after = self._health[endpoint.id] = judge(before, await probe(endpoint))
            if after.admitted != before.admitted:
                questions = _QUESTIONS
                self._changed()
            if after.admitted and questions:
                found = await room(endpoint)
                questions = 0 if found else questions - 1
                if found and found != self._room.get(endpoint.id):
                    self._room[endpoint.id] = found
                    self._changed()
            await asyncio.sleep(after.interval(len(self._tasks)))


async def probe(endpoint: Endpoint) -> Probe:
    """Ask an engine for ``/health`` once, on a connection of its own."""
    try:
        async with asyncio.timeout(_TIMEOUT):
            return await _ask(endpoint)
    except TimeoutError:
        return Probe.LATE
    except (OSError, asyncio.LimitOverrunError, asyncio.IncompleteReadError):
        return Probe.FAILED


async def room(endpoint: Endpoint) -> int:
    """Ask an engine once how many tokens' KV it can hold; 0 where it does not say so in time."""
    try:
        async with asyncio.timeout(_TIMEOUT), _asking(endpoint, "/metrics") as reader:
            found, text = 0, bytearray()
            while not found and len(text) < _MOST_BYTES and (piece := await reader.read(2**16)):
                text += piece
                found = kv_tokens(text.decode(errors="replace"))
            return found
    except (TimeoutError, OSError):
        return 0


async def _ask(endpoint: Endpoint) -> Probe:
    async with _asking(endpoint, "/health") as reader:
        status_line = await reader.readuntil(b"\r\n")
    return Probe.OK if status_line.split(b" ", 2)[1:2] == [b"200"] else Probe.FAILED


@contextlib.asynccontextmanager
async def _asking(endpoint: Endpoint, path: str) -> AsyncIterator[asyncio.StreamReader]:
    """Yield the answer to a request on a connection of its own."""
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {endpoint.host}\r\nConnection: close\r\n\r\n".encode())
        yield reader
    finally:
        writer.transport.abort()
