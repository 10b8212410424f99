"""An engine that does nothing: parameters for a prefill leg, a fixed stream for everything else.

``python -m bench.router.backend PORT CHUNKS PAUSE KV_EVENTS ADDRESSES``: with a pause, in seconds, events come one by
one; with a port for KV events, it publishes those of the prompts that come; it listens at so many loopback addresses.
It answers ``/health`` and ``/v1/models`` for routers that ask.
"""

from __future__ import annotations

import asyncio
import json
import sys
from email.utils import formatdate
from typing import cast

import httptools
import uvloop

from bench.router.events import Publisher

_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [list(range(16))],
    "remote_engine_id": "bench",
    "remote_request_id": "bench",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


def _json_answer(document: object) -> list[bytes]:
    body = json.dumps(document).encode()
    return [b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)]


def _stream(chunks: int) -> list[bytes]:
    event = b'data: {"id":"cmpl-bench","object":"text_completion","choices":[{"index":0,"text":" token"}]}\n\n'
    head = b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return [head, *[b"%x\r\n%b\r\n" % (len(event), event)] * chunks, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"]


_PREFILL = _json_answer({"id": "bench", "choices": [{"index": 0, "text": " t"}], "kv_transfer_params": _PARAMS})
_OTHER = _json_answer({"object": "list", "data": [{"id": "m", "object": "model"}]})


class Backend(asyncio.Protocol):
    """One connection."""

    def __init__(self, stream: list[bytes], pause: float, publisher: Publisher | None) -> None:
        self._publisher = publisher
        self._parser = httptools.HttpRequestParser(self)
        self._stream = stream
        self._pause = pause
        self._body = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Parse."""
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """Called by httptools."""
        self._body = b""

    def on_body(self, body: bytes) -> None:
        """Called by httptools."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer."""
        if self._body and self._publisher is not None:
            self._publisher.prompt(self._body)
        if not self._body:
            self._answer(_OTHER)
        elif b'"do_remote_decode":true' in self._body.replace(b" ", b""):
            self._answer(_PREFILL)
        else:
            self._answer(self._stream)

    def _answer(self, rest: list[bytes]) -> None:
        """Send a head as uvicorn writes it, new every second, and the rest."""
        date = formatdate(usegmt=True).encode()
        head = b"HTTP/1.1 200 OK\r\ndate: %b\r\nserver: uvicorn\r\n" % date
        if self._pause and rest is self._stream:
            self._transport.write(head + rest[0])
            self._next(1)
        else:
            self._transport.writelines([head, *rest])

    def _next(self, number: int) -> None:
        """Write one event, and the next one after the pause."""
        self._transport.write(self._stream[number])
        if number + 1 < len(self._stream) and not self._transport.is_closing():
            asyncio.get_running_loop().call_later(self._pause, self._next, number + 1)


def addresses(count: int) -> list[str]:
    """Return so many loopback addresses, from 127.0.0.1 on: those of one engine as if it were as many."""
    return [f"127.0.{number // 250}.{number % 250 + 1}" for number in range(count)]


def command(port: int, chunks: int, *, pause: float = 0.0, events: int = 0, count: int = 1) -> list[str]:
    """Return the command line of an engine that answers with ``chunks`` events, ``pause`` seconds apart.

    It listens at ``count`` addresses, and publishes its KV events on port ``events`` if that is not 0.
    """
    return [sys.executable, "-m", "bench.router.backend", str(port), str(chunks), str(pause), str(events), str(count)]


async def _serve(port: int, chunks: int, pause: float, events: int, count: int) -> None:
    stream, publisher = _stream(chunks), Publisher(events) if events else None
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Backend(stream, pause, publisher), addresses(count), port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])))
