"""KV events as vLLM publishes them: one message for each engine step, here every 10 ms, while prompts come.

The cache is as full as that of a busy engine: the shared beginning of a family of prompts stays, the rest of each is
stored when it comes and gives way to that of the next one, by an event for each block, the last one first. Names are
those that the router computes too.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import zmq

from twinpool.core.blockhash import chain

_STEP = 0.01
_BLOCK = 16
_BYTES_PER_TOKEN = 4
_encode = msgspec.msgpack.Encoder().encode


class _Asked(msgspec.Struct):
    prompt: str = ""


_asked = msgspec.json.Decoder(_Asked).decode


class Publisher:
    """The events of one engine."""

    def __init__(self, port: int) -> None:
        self._socket: zmq.Socket[Any] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"tcp://127.0.0.1:{port}")
        self._number = 0
        self._events: list[msgspec.Raw] = []
        #: A message will be sent at the end of the present step.
        self._due = False
        self._shared: set[int] = set()
        self._removed: list[msgspec.Raw] = []
        #: What a prompt's own blocks are stored and removed with.
        self._own: dict[str, tuple[msgspec.Raw, list[msgspec.Raw]]] = {}

    def prompt(self, body: bytes) -> None:
        """The prompt of a request's body was computed."""
        text = _asked(body).prompt
        stored, removed = self._own.get(text) or self._first(text)
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(_STEP, self._publish)
        self._events += self._removed
        self._removed = removed
        self._events.append(stored)

    def _first(self, prompt: str) -> tuple[msgspec.Raw, list[msgspec.Raw]]:
        """See a prompt for the first time: the beginning that it shares is stored for good."""
        text = prompt.encode()
        words = range(0, len(text) - _BYTES_PER_TOKEN + 1, _BYTES_PER_TOKEN)
        tokens = [int.from_bytes(text[place : place + _BYTES_PER_TOKEN], "big") % 128_000 for place in words]
        names = chain(tokens, _BLOCK, len(tokens))
        common = len(names) * 7 // 8
        if common and names[common - 1] not in self._shared:
            self._shared.add(names[common - 1])
            self._events.append(_stored(names[:common], None, tokens[: common * _BLOCK]))
        parent = names[common - 1] if common else None
        stored = _stored(names[common:], parent, tokens[common * _BLOCK : len(names) * _BLOCK])
        self._own[prompt] = stored, [_removed(name) for name in reversed(names[common:])]
        return self._own[prompt]

    def _publish(self) -> None:
        payload = _encode([time.time(), self._events, 0])
        self._socket.send_multipart([b"", self._number.to_bytes(8, "big"), payload])
        self._number += 1
        self._events = []
        self._due = False


def _stored(names: list[int], parent: int | None, tokens: list[int]) -> msgspec.Raw:
    event = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": _BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "group_idx": 0,
    }
    return msgspec.Raw(_encode(event))


def _removed(name: int) -> msgspec.Raw:
    return msgspec.Raw(_encode({"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}))
