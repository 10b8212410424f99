"""A scripted engine, an HTTP client that works on raw bytes, and a router in the test's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from twinpool.core.protocol import RouterConfig
from twinpool.router.logic.breaker import Breaker
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.settings import Limits
from twinpool.router.shell import routes
from twinpool.router.shell.client import ClientConnection
from twinpool.router.shell.pool import Pool
from twinpool.worker.engines.simulated import flags
from twinpool.worker.engines.simulated.server import running

DEADLINE = 10.0

#: What a prefill engine says of the prompt.
USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 500}}
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


async def until(condition: Callable[[], Any], what: str = "condition", seconds: float = DEADLINE) -> Any:
    """Wait until ``condition()`` is true; fail after a deadline."""
    async with asyncio.timeout(seconds):
        while not (value := condition()):  # noqa: ASYNC110 - most conditions here have no event
            await asyncio.sleep(0.002)
    return value


@dataclass
class Seen:
    """One request that an engine got."""

    method: str
    target: str
    headers: dict[str, str]
    raw_head: bytes
    body: bytes
    connection: int
    writer: asyncio.StreamWriter
    #: Set when the peer is gone while the request is answered.
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    answered: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def prefill(self) -> bool:
        return bool((self.json.get("kv_transfer_params") or {}).get("do_remote_decode"))


Script = Callable[["Engine", Seen], Awaitable[None]]


class Engine:
    """A raw-socket engine that records requests and behaves as its script says."""

    def __init__(self, role: str, name: str, revision: str = "r1") -> None:
        self.role = role
        self.name = name
        self.revision = revision
        self.requests: list[Seen] = []
        self.connections = 0
        self.script: Script = answer_normally
        self.port = 0
        self.release = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**27)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def endpoint(self, admitted: bool = True, identity: str | None = None) -> Endpoint:
        return Endpoint(
            id=identity or self.name,
            role=self.role,  # type: ignore[arg-type]
            host="127.0.0.1",
            port=self.port,
            revision=self.revision,
            pod=self.name,
            admitted=admitted,
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        number = self.connections
        try:
            # Cancelled by stop(): asyncio would report a cancelled connection task as an error.
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    await self._one(number, reader, writer)
        finally:
            self._tasks.discard(task)
            with contextlib.suppress(Exception):
                writer.transport.abort()

    async def _one(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        seen = Seen(method, target, headers, head, body, number, writer)
        self.requests.append(seen)
        answer = asyncio.ensure_future(self.script(self, seen))
        watch = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait([answer, watch], return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and not answer.done():
                seen.aborted.set()
                raise ConnectionError
            seen.answered = True
            await answer
        finally:
            for task in (answer, watch):
                task.cancel()
            results = await asyncio.gather(answer, watch, return_exceptions=True)
            del results
        if writer.is_closing():
            raise ConnectionError


def response(body: bytes, status: str = "200 OK", kind: str = "application/json", extra: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n"
    b"x-engine: yes\r\n\r\n"
)
EVENTS = [b'data: {"choices":[{"text":"t%d"}]}\n\n' % n for n in range(5)] + [b"data: [DONE]\n\n"]
SSE = SSE_HEAD + b"".join(chunk(e) for e in EVENTS) + b"0\r\n\r\n"


async def answer_normally(engine: Engine, seen: Seen) -> None:
    """Prefill legs get parameters, streams five events, the rest a short JSON answer."""
    if seen.body and seen.prefill:
        seen.writer.write(response(json.dumps({"id": "p", "kv_transfer_params": PARAMS, "usage": USAGE}).encode()))
    elif seen.body and seen.json.get("stream"):
        seen.writer.write(SSE)
    else:
        seen.writer.write(response(b'{"served_by":"%b"}' % engine.name.encode()))
    await seen.writer.drain()


def always(raw: bytes, close: bool = False) -> Script:
    async def script(engine: Engine, seen: Seen) -> None:
        seen.writer.write(raw)
        await seen.writer.drain()
        if close:
            seen.writer.close()

    return script


async def hang(engine: Engine, seen: Seen) -> None:
    await engine.release.wait()
    await answer_normally(engine, seen)


async def reset(engine: Engine, seen: Seen) -> None:
    sock = seen.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    seen.writer.transport.abort()
    await asyncio.sleep(0)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    #: Head and body exactly as they came.
    raw: bytes
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


class RawClient:
    """One connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> Answer:
        async with asyncio.timeout(DEADLINE):
            head = await self.reader.readuntil(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            status = int(lines[0].split(" ")[1])
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:] if line)}
            if status == 100:
                return Answer(status, headers, head, b"")
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
                return Answer(status, headers, head + body, body)
            raw = body = b""
            while True:
                line = await self.reader.readuntil(b"\r\n")
                piece = await self.reader.readexactly(int(line, 16) + 2)
                raw += line + piece
                body += piece[:-2]
                if line == b"0\r\n":
                    return Answer(status, headers, head + raw, body)

    async def rest(self) -> bytes:
        async with asyncio.timeout(DEADLINE):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
        return b""

    def abort(self) -> None:
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


def post(body: bytes | dict[str, Any], path: str = "/v1/completions", headers: str = "") -> bytes:
    if isinstance(body, dict):
        body = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: r\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


PROMPT: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 5}
STREAM: dict[str, Any] = {**PROMPT, "stream": True}


class Router:
    """The data plane in the test's loop, with engines of its own."""

    def __init__(self, config: RouterConfig, limits: Limits) -> None:
        self.loop = asyncio.get_running_loop()
        self.pool = Pool(self.loop, config, limits, Random(1))
        self.clients: set[ClientConnection] = set()
        #: Those in service; a test may take some out.
        self.engines: list[Engine] = []
        self._owned: list[Engine] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._raw: list[RawClient] = []

    async def start(self) -> None:
        models = routes.models_answer(self.pool.config, 1)
        self._server = await self.loop.create_server(
            lambda: ClientConnection(self.pool, self.clients, models), "127.0.0.1", 0
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def engine(self, role: str, script: Script = answer_normally, revision: str = "r1") -> Engine:
        number = sum(e.role == role for e in self.engines)
        engine = Engine(role, f"{role}-{number}", revision)
        engine.script = script
        await engine.start()
        self.engines.append(engine)
        self._owned.append(engine)
        self.pool.breaker = Breaker()  # as if all had been there from the start: nobody starts slowly
        self.publish()
        return engine

    def publish(self) -> None:
        self.pool.update(tuple(e.endpoint() for e in self.engines))

    async def connect(self) -> RawClient:
        client = RawClient(*await asyncio.open_connection("127.0.0.1", self.port, limit=2**26))
        self._raw.append(client)
        return client

    async def ask(self, data: bytes) -> Answer:
        client = await self.connect()
        client.send(data)
        answer = await client.answer()
        client.close()
        return answer

    def value(self, name: str, *labels: str) -> float:
        return self.pool.numbers.values.get(f"twinpool_router_{name}", {}).get(labels, 0.0)

    async def idle(self) -> None:
        """Wait until nothing is left in any book."""
        await until(lambda: not self.pool.ledger.items(), "an empty ledger")
        await until(lambda: self.pool.body_bytes == 0, "no body held")

    async def stop(self) -> None:
        for client in self._raw:
            client.abort()
        if self._server is not None:
            self._server.close()
        await until(lambda: not self.clients, "no clients")
        self.pool.connections.close()
        for engine in self._owned:
            await engine.stop()
        await self.idle()
        for _ in range(5):  # asyncio closes an aborted transport's socket a turn later
            await asyncio.sleep(0)


@pytest.fixture
async def make_router() -> AsyncIterator[Callable[..., Awaitable[Router]]]:
    routers: list[Router] = []

    async def make(limits: Limits | None = None, **config: Any) -> Router:
        settings = {"pool": "p", "namespace": "n", "models": ("m", "other"), "policy": "round-robin", **config}
        router = Router(RouterConfig(**settings), limits or Limits())
        await router.start()
        routers.append(router)
        return router

    yield make
    for router in routers:
        await router.stop()


@pytest.fixture
async def router(make_router: Callable[..., Awaitable[Router]]) -> Router:
    """One router with one prefill and one decode engine."""
    result = await make_router()
    await result.engine("prefill")
    await result.engine("decode")
    return result


#: The lease frees what decode refuses to pull: prefill accepts a request whose limits only decode gets to see.
SIMULATED = ("--model", "m", "--time-scale", "0", "--max-model-len", "256", "--lease-seconds", "2")
_hosts = itertools.count(1)


@pytest.fixture
async def twins(make_router: Callable[..., Awaitable[Router]]) -> AsyncIterator[Any]:
    """A router over a simulated prefill and decode engine (``apps``), and one that serves ``alone``."""
    # Thirty connections at once share this loop with both engines: on a busy machine that takes seconds.
    router: Any = await make_router(Limits(connect_timeout=60.0), models=("m", "other"))
    async with contextlib.AsyncExitStack() as stack:
        router.apps, endpoints = {}, []
        for role in ("prefill", "decode", "aggregated"):
            host = f"127.92.{os.getpid() % 250}.{next(_hosts)}"  # tests run in several processes
            connector = () if role == "aggregated" else ("--connector", "nixl")
            settings = flags.parse(["--host", host, "--role", role, *SIMULATED, *connector])
            router.apps[role] = await stack.enter_async_context(running(settings))
            router.alone = host
            if role != "aggregated":
                endpoints.append(Endpoint(role, role, host, 8000, pod=role, admitted=True))  # type: ignore[arg-type]
        router.pool.update(endpoints)
        yield router
        router.pool.connections.close()


@pytest.fixture
def kit() -> Any:
    """The helpers of this file, for tests that import nothing."""
    import sys

    return sys.modules[__name__]


@pytest.fixture(scope="session", autouse=True)
def _no_stray_event_loop() -> None:
    """Python 3.11 makes a loop for whoever asks for the current one: pytest-asyncio asks, and nobody would close it."""
    asyncio.set_event_loop(None)
