"""Publishes KV cache events over ZMQ in vLLM's format, and replays recent ones.

A message has three frames: topic, sequence number (8 bytes, big-endian, from 0), and msgpack of
``[time, events, rank]``. A replay request is ``[empty, first number]`` to the replay socket; the answer is one
``[empty, topic, number, payload]`` for each message since, and ends with number -1. Blocks have vLLM's names
(``twinpool.core.blockhash``). On request every Nth message is lost on its way; replays have it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

from twinpool.worker.engines.simulated.logic.blocks import CacheEvent, Cleared, Removed, Stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.worker.engines.simulated.flags import EventSettings

_END = (-1).to_bytes(8, "big", signed=True)


def event_map(event: CacheEvent, block_size: int) -> dict[str, Any]:
    """Return an event as vLLM writes it."""
    match event:
        case Stored(medium="CPU"):
            return {
                "type": "BlockStored",
                "block_hashes": list(event.hashes),
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": 0,
                "lora_id": None,
                "medium": "CPU",
                "lora_name": None,
                "group_idx": 0,
            }
        case Stored():
            return {
                "type": "BlockStored",
                "block_hashes": list(event.hashes),
                "parent_block_hash": event.parent,
                "token_ids": list(event.tokens),
                "block_size": block_size,
                "lora_id": None if event.adapter is None else 1,
                "medium": "GPU",
                "lora_name": None if event.adapter is None else event.adapter[0],
                "extra_keys": _extra_keys(event),
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        case Removed():
            return {"type": "BlockRemoved", "block_hashes": [event.hash], "medium": event.medium, "group_idx": 0}
        case Cleared():
            return {"type": "AllBlocksCleared"}


def _extra_keys(event: Stored) -> list[list[str] | None]:
    """Return what besides its tokens each block is named by."""
    each = list(event.adapter or ())
    first = [*each, *(() if event.salt is None else (event.salt,))]
    return [keys or None for keys in (first, *[each] * (len(event.hashes) - 1))]


class Publisher:
    """One PUB socket and, when asked for, one ROUTER socket for replays. ``tcp://*`` binds the pod's own address."""

    def __init__(
        self, settings: EventSettings, host: str, block_size: int, lose: int | None = None, *, rank: int = 0
    ) -> None:
        # Publishing never waits: ZMQ drops for subscribers that are too slow, and a gap in the numbers tells them.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._topic = settings.topic.encode()
        self._block_size = block_size
        self._rank = rank
        self._number = 0
        self._lose = lose
        self._recent: deque[tuple[bytes, bytes]] = deque(maxlen=settings.buffer_steps)
        self._pub = self._context.socket(zmq.PUB)
        _attach(self._pub, settings.endpoint, host, rank)
        self._replay_task: asyncio.Task[None] | None = None
        if settings.replay_endpoint is not None:
            replay = zmq.asyncio.Context(self._context).socket(zmq.ROUTER)
            _attach(replay, settings.replay_endpoint, host, rank)
            self._replay_task = asyncio.create_task(self._serve_replays(replay))

    def publish(self, events: Sequence[CacheEvent], wall_time: float) -> None:
        """Publish one batch; ``wall_time`` in seconds since the epoch."""
        payload = msgspec.msgpack.encode(
            [wall_time, [event_map(event, self._block_size) for event in events], self._rank]
        )
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._recent.append((number, payload))
        if not self._lose or self._number % self._lose:
            self._pub.send_multipart([self._topic, number, payload], flags=zmq.NOBLOCK)

    async def _serve_replays(self, replay: zmq.asyncio.Socket) -> None:
        try:
            await self._answer_replays(replay)
        finally:
            replay.close(linger=0)

    async def _answer_replays(self, replay: zmq.asyncio.Socket) -> None:
        while True:
            frames = await replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, _empty, first = frames
            for number, payload in tuple(self._recent):
                if number >= first:
                    await replay.send_multipart([client, b"", self._topic, number, payload])
            await replay.send_multipart([client, b"", self._topic, _END, b""])

    async def close(self) -> None:
        """Close the sockets."""
        if self._replay_task is not None:
            self._replay_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._replay_task
        self._pub.close(linger=0)
        self._context.term()


def _attach(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, endpoint: str, host: str, rank: int) -> None:
    """Bind or connect by vLLM's rules: an address with ``*`` is ours, any other a collector's; each rank has a port."""
    head, _, port = endpoint.rpartition(":")
    endpoint = f"{head}:{int(port) + rank}" if port.isdecimal() else endpoint
    if "*" in endpoint:
        socket.bind(endpoint.replace("*", host))
    else:
        socket.connect(endpoint)
