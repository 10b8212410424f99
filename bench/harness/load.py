"""A small load of concurrent streams, cheap enough to measure servers with on the same machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvloop

from twinpool.core.errors import TwinpoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

_END = b"0\r\n\r\n"


class LoadFailed(TwinpoolError):
    """A server did not answer as a benchmark needs it to."""


def stream(
    host: str, port: int, path: str, bodies: Sequence[bytes], streams: int, requests: int, headers: str = ""
) -> int:
    """Keep ``streams`` requests running until ``requests`` were answered; return the server-sent events received.

    The bodies are sent in turn, with ``headers`` (lines with CRLF) besides those that are needed.

    Raises
    ------
    LoadFailed
        When an answer is not a complete chunked one with HTTP 200: a benchmark of failures would be a lie.
    """
    head = head_of(host, path, headers)
    whole = [b"%b%d\r\n\r\n%b" % (head, len(body), body) for body in bodies]
    return uvloop.run(_all(host, port, whole, streams, requests))


def head_of(host: str, path: str, headers: str = "") -> bytes:
    """Return a request's head up to the number of its Content-Length; ``headers`` are lines with CRLF."""
    lines = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{headers}content-length: "
    return lines.encode()


async def _all(host: str, port: int, whole: Sequence[bytes], streams: int, requests: int) -> int:
    left = iter(range(requests))

    async def client() -> int:
        reader, writer = await asyncio.open_connection(host, port)
        events = 0
        for number in left:
            writer.write(whole[number % len(whole)])
            events += await answer_of(reader)
        writer.close()
        return events

    try:
        return sum(await asyncio.gather(*(client() for _ in range(streams))))
    except (OSError, asyncio.IncompleteReadError) as error:
        raise LoadFailed(f"{host}:{port} broke off: {error}", "look at the server's own output") from None


async def answer_of(reader: asyncio.StreamReader, head: bytes = b"") -> int:
    """Read one streamed answer to its end, after its ``head`` if that was read; return its events.

    Raises
    ------
    LoadFailed
        When it is not a chunked answer with HTTP 200.
    """
    head = head or await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or b"chunked" not in head.lower():
        raise LoadFailed(f"not a stream: {head[:80]!r}", "look at the server's own output")
    events, tail = 0, b""
    while not tail.endswith(_END):
        data = await reader.read(65536)
        if not data:
            raise asyncio.IncompleteReadError(tail, None)
        events += data.count(b"data: {")
        tail = (tail + data)[-len(_END) :]
    return events
