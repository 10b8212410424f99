"""The port that no client reaches: ``/metrics``, ``/ready``, ``/health`` and ``/admin/...``. Read-only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

#: Returns status, content type and body.
Page = Callable[[], Awaitable[tuple[int, str, bytes]]]

JSON = "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
_TIMEOUT = 10.0
_MAX_HEAD = 16 * 1024
_MAX_CONNECTIONS = 64


class AdminServer:
    """A GET-only HTTP server, one request per connection."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._open = 0

    async def start(self, host: str, port: int) -> asyncio.Server:
        """Listen; the caller closes the server."""
        return await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_TIMEOUT):
                    await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the caller went away, was too slow (TimeoutError) or sent no request
        finally:
            self._open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        page = self._pages.get(path)
        if page is None:
            known = ", ".join(sorted(self._pages))
            status, kind, body = 404, JSON, json.dumps({"error": f"unknown path; there are {known}"}).encode()
        elif method != "GET":
            status, kind, body = 405, JSON, b'{"error":"only GET"}'
        else:
            status, kind, body = await page()
        phrase = HTTPStatus(status).phrase
        lines = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        writer.write(lines.encode() + b"Connection: close\r\n\r\n" + body)
        await writer.drain()
