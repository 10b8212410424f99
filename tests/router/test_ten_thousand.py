"""Ten thousand clients: nobody fails because one of two prefill workers is dead, and those who leave leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random

import httptools
import uvloop

from twinpool.core.protocol import RouterConfig
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.settings import Limits

COUNT = 10_000
CLIENTS = 40


class Engine(asyncio.Protocol):
    """An engine that costs little: fixed answers, told apart by the leg."""

    def __init__(self, prefill_answer: bytes, stream: bytes) -> None:
        self._answers = {True: prefill_answer, False: stream}
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        self._parser.feed_data(data)

    def on_message_begin(self):
        self._body = b""

    def on_body(self, body):
        self._body += body

    def on_message_complete(self):
        self._transport.write(self._answers[b'"do_remote_decode":true' in self._body])


@contextlib.asynccontextmanager
async def crowded(kit):
    """A router over two prefill and two decode engines; the second prefill engine's port is closed."""
    router = kit.Router(RouterConfig("p", "n", ("m",)), Limits())
    await router.start()
    prefill = kit.response(b'{"kv_transfer_params":{"do_remote_prefill":true}}')
    servers, endpoints = [], []
    for number, role in enumerate(("prefill", "prefill", "decode", "decode")):
        server = await router.loop.create_server(lambda: Engine(prefill, kit.SSE), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        endpoints.append(Endpoint(f"{role}-{number}", role, "127.0.0.1", port, pod=f"{role}-{number}", admitted=True))
        servers.append(server)
    servers[1].close()
    router.pool.update(endpoints)
    yield router
    await router.stop()
    for server in servers:
        server.close()


async def _none_fails(kit):
    request = kit.post(kit.STREAM)
    ends = kit.SSE[-30:]
    failed = []

    async def client(port: int, count: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(count):
            writer.write(request)
            answer = await reader.readuntil(ends)
            if not answer.startswith(b"HTTP/1.1 200 OK\r\n") or b"error" in answer:
                failed.append(answer)
        writer.transport.abort()

    async with crowded(kit) as router:
        await asyncio.gather(*(client(router.port, COUNT // CLIENTS) for _ in range(CLIENTS)))
        assert not failed
        assert router.value("requests_total", "/v1/completions", "200") == COUNT
        assert router.value("handoffs_total", "remote", "") == COUNT, "none had to be prefilled by decode either"
        tried = router.value("worker_failures_total", "prefill", "connect")
        assert 1 <= tried <= 10 * CLIENTS, "the dead one is tried now and then, not by every request"


async def _nothing_is_left(kit):
    request = kit.post(kit.STREAM)
    rng = random.Random(1)

    async def client(router, count: int) -> None:
        for _ in range(count):
            transport, _ = await router.loop.create_connection(asyncio.Protocol, "127.0.0.1", router.port)
            transport.write(request[: rng.randrange(len(request))] if rng.random() < 0.2 else request)
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            transport.abort()

    async with crowded(kit) as router:
        await asyncio.gather(*(client(router, COUNT // CLIENTS) for _ in range(CLIENTS)))
        await kit.until(lambda: not router.clients, "every connection closed")
        await router.idle()
        aborts = sum(router.pool.numbers.values["twinpool_router_client_aborts_total"].values())
        assert aborts > COUNT / 100, "some of them left in the middle"
        assert (await router.ask(request)).status == 200


def test_with_one_of_two_prefill_workers_dead_nobody_fails(kit):
    uvloop.run(_none_fails(kit))


def test_those_who_leave_leave_nothing(kit):
    uvloop.run(_nothing_is_left(kit))
