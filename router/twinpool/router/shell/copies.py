"""Asks the other routers of a pool for their books, again and again (:mod:`twinpool.router.logic.copies`).

Over the admin port, which clients do not reach; only addresses of the pool's own pods are asked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from twinpool.router.logic.copies import Books, Copies, Copy, read_books

if TYPE_CHECKING:
    from collections.abc import Callable

PATH: Final = "/admin/books"
#: An answer that takes longer is old when it comes.
_TIMEOUT: Final = 0.5
_LONGEST: Final = 2**20


async def follow(copies: Copies, looked: Callable[[], None]) -> None:
    """Ask all others for ever; ``looked`` is called after each look."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(copies.interval)
        if copies.alone:
            continue
        asked = copies.asked()
        for copy, books in zip(asked, await asyncio.gather(*map(ask, asked)), strict=True):
            if books is not None:
                copies.heard(copy.name, books, loop.time())
        looked()


async def ask(copy: Copy) -> Books | None:
    """Return the books of a router, or None when it does not tell them in time."""
    try:
        async with asyncio.timeout(_TIMEOUT):
            reader, writer = await asyncio.open_connection(copy.host, copy.port, limit=_LONGEST)
            try:
                writer.write(f"GET {PATH} HTTP/1.1\r\nHost: {copy.host}\r\n\r\n".encode())
                status_line = await reader.readuntil(b"\r\n\r\n")
                body = await reader.read(_LONGEST)
                while piece := await reader.read(_LONGEST - len(body)):
                    body += piece
            finally:
                writer.transport.abort()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):  # TimeoutError is an OSError
        return None
    return read_books(body) if status_line.startswith(b"HTTP/1.1 200 ") else None
