"""The handoff's side channel: decode workers pull a prompt's KV from the prefill worker that holds it.

Stands for NIXL: one TCP connection, messages of msgpack behind a 4-byte length. What travels is the KV's *content*
(what decides the answer); the time that its bytes would take is simulated by the puller. Messages of the puller:

``pull``     {model, shape, engine, request} -> {content} or {problem}
``done``     {request}: all was read; the holder frees its blocks
``discard``  {request}: not wanted; the holder frees its blocks
``extend``   {request}: still wanted; the lease starts anew
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from twinpool.worker.engines.simulated.logic.language import Content

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from twinpool.worker.engines.simulated.logic.engine import Engine
    from twinpool.worker.engines.simulated.logic.sequence import RemoteKv

MAX_FRAME = 64 * 1024
#: How often a puller tries to connect before its handshake has failed.
_RETRY_SECONDS = 0.1
_NOTICE_SECONDS = 5.0


class PullFailed(Exception):
    """The KV could not be pulled; the message says why."""


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message; raises ``IncompleteReadError`` at the end and ``ValueError`` for what is none."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_FRAME:
        raise ValueError(f"a message of {size} bytes is larger than {MAX_FRAME}")
    message = msgspec.msgpack.decode(await reader.readexactly(size))
    if not isinstance(message, dict):
        raise ValueError("a message is not a map")
    return message


def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Queue a message."""
    data = msgspec.msgpack.encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)


class Holder:
    """The prefill side: answers pulls from the engine's leases."""

    def __init__(self, engine: Engine, engine_id: str, model: str, changed: Callable[[], None]) -> None:
        self._engine = engine
        self._engine_id = engine_id
        self._model = model
        self._changed = changed

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until the other side closes it; a message that is none closes it too."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError, asyncio.CancelledError):
            while True:
                self._take(await receive(reader), writer)
                await writer.drain()
        writer.close()

    def _take(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        request = str(message.get("request"))
        match message.get("op"):
            case "pull":
                send(writer, self._answer(message, request))
            case "done" | "discard":
                self._engine.release(request)
                self._changed()
            case "extend":
                self._engine.leases.extend(request, asyncio.get_running_loop().time())
            case other:
                raise ValueError(f"unknown message {other!r}")

    def _answer(self, message: dict[str, Any], request: str) -> dict[str, Any]:
        ours = (self._model, self._engine.pace.shape.name)
        if (message.get("model"), message.get("shape")) != ours:
            return {"problem": f"NIXL compatibility hash mismatch: this engine holds KV of {ours[0]} ({ours[1]})"}
        lease = self._engine.leases.get(request)
        if message.get("engine") != self._engine_id or lease is None:
            return {
                "problem": f"the KV of {request} is not held here (pulled already, expired, or the engine restarted)"
            }
        content = lease.content
        return {"content": [content.state, content.last, content.before, content.opening]}


class Puller:
    """The decode side. Orders that name the same KV at the same time share one pull, as they read the same blocks."""

    def __init__(self, engine: Engine, model: str, settings_timeout: float, time_scale: float) -> None:
        self._engine = engine
        self._model = model
        self._timeout = settings_timeout
        self._time_scale = time_scale
        self._shared: dict[RemoteKv, tuple[asyncio.Task[tuple[Content, float]], set[str]]] = {}
        self._notices: set[asyncio.Task[None]] = set()

    async def pull(self, order_id: str, remote: RemoteKv, blocks: int) -> tuple[Content, float]:
        """Return the KV's content and the seconds that the transfer took.

        Raises
        ------
        PullFailed
            When its holder does not answer in time, does not hold it any more, or holds that of another model.
        """
        shared = self._shared.get(remote)
        if shared is None:
            task = asyncio.create_task(self._fetch(remote, blocks))
            shared = self._shared[remote] = (task, set())
            task.add_done_callback(lambda _: self._shared.pop(remote, None))
        task, waiting = shared
        waiting.add(order_id)
        try:
            return await asyncio.shield(task)
        finally:
            waiting.discard(order_id)
            if not waiting:
                task.cancel()

    def notify(self, remote: RemoteKv, op: str) -> None:
        """Tell a holder something in the background; one that does not listen any more is left alone."""
        task = asyncio.create_task(self._notice(remote, op))
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)

    async def settled(self) -> None:
        """Wait until all notices are sent or given up."""
        await asyncio.gather(*self._notices)

    async def _notice(self, remote: RemoteKv, op: str) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_NOTICE_SECONDS):
                _, writer = await asyncio.open_connection(remote.host, remote.port)
                send(writer, {"op": op, "request": remote.request_id})
                await _closed(writer)

    async def _fetch(self, remote: RemoteKv, blocks: int) -> tuple[Content, float]:
        start = asyncio.get_running_loop().time()
        # Closed in every case: a pull is also cancelled while it waits for the answer, when nobody wants it any more.
        async with contextlib.AsyncExitStack() as connection:
            try:
                async with asyncio.timeout(self._timeout):
                    reader, writer = await _patiently(lambda: asyncio.open_connection(remote.host, remote.port))
                    connection.push_async_callback(_closed, writer)
                    send(writer, self._pull(remote))
                    answer = await receive(reader)
            except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError) as error:
                raise PullFailed(
                    f"NIXL handshake with {remote.host}:{remote.port} failed: {type(error).__name__} {error}"
                ) from None
            if "content" not in answer:
                raise PullFailed(str(answer.get("problem")))
            seconds = self._engine.pace.transfer(blocks, self._engine.limits.block_size) * self._time_scale
            await asyncio.sleep(seconds)
            send(writer, {"op": "done", "request": remote.request_id})
        return Content(*answer["content"]), asyncio.get_running_loop().time() - start

    def _pull(self, remote: RemoteKv) -> dict[str, str]:
        return {
            "op": "pull",
            "model": self._model,
            "shape": self._engine.pace.shape.name,
            "engine": remote.engine_id,
            "request": remote.request_id,
        }


async def _patiently(
    connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]],
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, however long it takes: NIXL's own handshake waits for a side that does not listen, too."""
    while True:
        try:
            return await connect()
        except ConnectionError:
            await asyncio.sleep(_RETRY_SECONDS)


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
