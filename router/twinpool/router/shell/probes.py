"""Probes every wanted endpoint's ``/health`` and says when the router's opinion of one changes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from twinpool.router.logic.health import Health, Probe, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twinpool.router.logic.endpoints import Endpoint

#: Long, because a probe that comes late proves nothing and only occupies the engine.
_TIMEOUT = 5.0


class Prober:
    """One task per wanted endpoint. ``changed`` is called when :meth:`admitted` has a new answer for some endpoint."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._health: dict[str, Health] = {}

    def admitted(self, endpoint: str) -> bool:
        """Whether the endpoint with this id answers."""
        return self._health.get(endpoint, Health()).admitted

    def losses(self, endpoint: str) -> int:
        """How often the endpoint with this id stopped answering."""
        return self._health.get(endpoint, Health()).losses

    def watch(self, endpoints: Iterable[Endpoint]) -> None:
        """Probe these endpoints from now on, and no others."""
        wanted = {endpoint.id: endpoint for endpoint in endpoints}
        for identity in self._tasks.keys() - wanted.keys():
            self._tasks.pop(identity).cancel()
            self._health.pop(identity, None)
        for identity in wanted.keys() - self._tasks.keys():
            self._tasks[identity] = asyncio.ensure_future(self._follow(wanted[identity]))

    def close(self) -> None:
        """Stop probing."""
        self.watch(())

    async def _follow(self, endpoint: Endpoint) -> None:
        while True:
            before = self._health.get(endpoint.id, Health())
            after = self._health[endpoint.id] = judge(before, await probe(endpoint))
            if after.admitted != before.admitted:
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


async def _ask(endpoint: Endpoint) -> Probe:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    try:
        writer.write(f"GET /health HTTP/1.1\r\nHost: {endpoint.host}\r\nConnection: close\r\n\r\n".encode())
        status_line = await reader.readuntil(b"\r\n")
    finally:
        writer.transport.abort()
    return Probe.OK if status_line.split(b" ", 2)[1:2] == [b"200"] else Probe.FAILED
