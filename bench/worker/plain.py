"""The least that a streaming server can do: no parsing of bodies, no engine, a fixed event per token.

``python -m bench.worker.plain PORT TOKENS SECONDS`` answers every POST with TOKENS server-sent events, one each
SECONDS.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = b"data: " + b'{"choices":[{"index":0,"text":" token","finish_reason":null}],"pad":"' + b"x" * 110 + b'"}\n\n'
_CHUNK = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def _serve(port: int, tokens: int, seconds: float) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
                writer.write(_HEAD)
                for _ in range(tokens):
                    writer.write(_CHUNK)
                    await asyncio.sleep(seconds)
                writer.write(_END)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port, backlog=2048)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
