"""Two loads: requests at a fixed rate through one server and past it, and many streams that stay open."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import uvloop

from bench.harness.load import answer_of, head_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def added_latency(
    host: str,
    router: int,
    engine: int,
    path: str,
    bodies: Sequence[bytes],
    *,
    rate: float,
    seconds: float,
    headers: str,
) -> float:
    """Return the median time of a whole answer through ``router`` beyond that of ``engine`` alone, in seconds.

    Each is asked ``rate`` times a second, one half a period after the other, over connections that are kept.
    """
    return uvloop.run(_added_latency(host, (router, engine), path, bodies, rate, seconds, headers))


async def _added_latency(
    host: str, ports: tuple[int, int], path: str, bodies: Sequence[bytes], rate: float, seconds: float, headers: str
) -> float:
    head = head_of(host, path, headers)
    idle: dict[int, list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] = {port: [] for port in ports}
    times: dict[int, list[float]] = {port: [] for port in ports}

    async def ask(port: int, body: bytes) -> None:
        connection = idle[port].pop() if idle[port] else await asyncio.open_connection(host, port)
        begun = time.perf_counter()
        connection[1].write(b"%b%d\r\n\r\n%b" % (head, len(body), body))
        await answer_of(connection[0])
        times[port].append(time.perf_counter() - begun)
        idle[port].append(connection)

    asked = []
    begun = time.perf_counter()
    for number in range(int(2 * rate * seconds)):
        await asyncio.sleep(max(0.0, begun + number / (2 * rate) - time.perf_counter()))
        asked.append(asyncio.ensure_future(ask(ports[number % 2], bodies[number // 2 % len(bodies)])))
    await asyncio.gather(*asked)
    for _, writer in (*idle[ports[0]], *idle[ports[1]]):
        writer.close()
    through, alone = (sorted(times[port]) for port in ports)
    return through[len(through) // 2] - alone[len(alone) // 2]


def open_streams(
    host: str, port: int, path: str, body: bytes, count: int, headers: str, measure: Callable[[], float]
) -> float:
    """Open ``count`` streams, return what ``measure`` says while all of them are open, and read them to their ends.

    Raises
    ------
    LoadFailed
        When one is not a complete answer with HTTP 200.
    """
    return uvloop.run(_open_streams(host, port, b"%b%d\r\n\r\n%b" % (head_of(host, path, headers), len(body), body),
                                    count, measure))  # fmt: skip


async def _open_streams(host: str, port: int, request: bytes, count: int, measure: Callable[[], float]) -> float:
    room, begun, opened = asyncio.Semaphore(100), asyncio.Event(), 0

    async def client() -> None:
        nonlocal opened
        async with room:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request)
            first = await reader.readuntil(b"\r\n\r\n")
        opened += 1
        if opened == count:
            begun.set()
        await answer_of(reader, first)
        writer.close()

    clients = asyncio.gather(*(client() for _ in range(count)))
    waiting = asyncio.ensure_future(begun.wait())
    await asyncio.wait((clients, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    value = measure()
    await clients
    return value
