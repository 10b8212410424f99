"""The connections of the watches: whether each still says something, and when one had to list everything again.

Load balancers and proxies drop connections without a word, so an open connection proves nothing. The API server
sends a bookmark about once a minute on every watch, and kopf reconnects a watch that was silent for longer; a watch
that stays silent in spite of that is broken in a way that only a restart mends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import kopf

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds without a byte after which a watch counts as silent: kopf has reconnected twice by then.
SILENT_AFTER = 180.0

#: What the API server answers when it no longer knows the state that the first chunk of a list was taken from.
_GONE = 410


class Streams:
    """What the watches' connections receive. ``relisted`` is called with the path of a watch that starts anew."""

    def __init__(self, relisted: Callable[[str], None] = lambda _: None) -> None:
        self._relisted = relisted
        self._open: dict[str, aiohttp.ClientResponse] = {}
        self._bytes: dict[str, int] = {}
        self._heard: dict[str, float] = {}
        self._begun = asyncio.Condition()

    def session(self, login: kopf.ConnectionInfo) -> kopf.AiohttpSession:
        """Return a session with the credentials of ``login`` whose watches are looked at here."""
        trace = aiohttp.TraceConfig()
        trace.on_request_end.append(self._answered)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=login.as_ssl_context()),
            headers=login.as_http_headers(),
            proxy=login.proxy_url,
            trust_env=login.trust_env,
            trace_configs=[trace],
        )
        return kopf.AiohttpSession(
            server=login.server, default_namespace=login.default_namespace, aiohttp_session=session
        )

    async def _answered(self, _: Any, __: Any, event: aiohttp.TraceRequestEndParams) -> None:
        path, query = event.url.path, event.url.query
        if event.response.status == _GONE and query.get("continue"):
            event.response.release()
            # Of all errors kopf takes this one for a list that was cut off, which it begins anew; a 410 would end it.
            raise aiohttp.ClientPayloadError(f"listing {path} took too long: the API server cannot go on from there")
        if event.response.status != 200 or event.method != "GET":
            return
        if query.get("watch") == "true":
            self._open[path], self._bytes[path], self._heard[path] = event.response, 0, self._now()
            async with self._begun:
                self._begun.notify_all()
        elif path in self._open and not query.get("continue"):
            self._relisted(path)

    async def watched(self, path: str) -> None:
        """Return when the watch of a path that ends like this has begun, which is after its first list."""
        async with self._begun:
            await self._begun.wait_for(lambda: any(found.endswith(path) for found in self._open))

    def silent(self) -> list[str]:
        """Return the paths of watches that received nothing for long."""
        now = self._now()
        for path, response in self._open.items():
            received = response.content.total_bytes
            if received != self._bytes[path]:
                self._bytes[path], self._heard[path] = received, now
        return sorted(path for path, heard in self._heard.items() if now - heard > SILENT_AFTER)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
