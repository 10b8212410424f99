"""Faults of other routers, one test each; ``docs/immunity.md`` has the reports."""

from __future__ import annotations

import asyncio
import os

import msgspec
import zmq
import zmq.asyncio

from twinpool.core.blockhash import chain
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.index_approximate import ApproximateIndex
from twinpool.router.logic.index_events import Event
from twinpool.router.logic.index_exact import ExactIndex
from twinpool.router.logic.index_table import ENTRY_BYTES
from twinpool.router.logic.index_view import MOST_BLOCKS, ExactView
from twinpool.router.shell.events import Followers


async def test_a_pair_in_name_only_is_named_by_its_first_request(router, kit):
    # An engine without connector answers the prefill leg like any other request.
    for engine in router.engines:
        if engine.role == "prefill":
            engine.script = kit.always(kit.response(b'{"id":"p","choices":[{"text":"t"}]}'))
    answer = await router.ask(kit.post(kit.STREAM))
    assert answer.status == 200
    assert router.value("handoffs_total", "local", "no_params") == 1
    assert router.value("handoffs_total", "remote", "") == 0


def test_no_number_of_prompts_or_blocks_makes_an_index_grow():
    capacity = 1024
    estimate, exact, view = ApproximateIndex(capacity), ExactIndex(capacity), ExactView()
    for number in range(60):
        keys = [*range(1 + number * 100, 101 + number * 100)]
        estimate.learn(keys, f"w{number}")
        estimate.keep({f"w{number}"})
        holder = f"w{number}"
        exact.apply(holder, (Event("BlockStored", list(keys)),))
        exact.expect(holder, keys, float(number))
        exact.keep({f"w{number}"})
    for table in (estimate.table, exact.table):
        assert table.entries <= capacity
        assert table.table_bytes == ENTRY_BYTES * capacity + capacity // 8
        assert len(table.sets) <= capacity
    # Blocks of one token: as many names as of any other size, at most.
    view.rely(1, frozenset({"w"}))
    assert len(view.names([5] * 100_000, {})) == MOST_BLOCKS


async def test_a_replay_without_topics_is_understood():
    """vLLM's end of a replay has an empty topic, and a replay may have another one than what is published live."""
    host = f"127.94.{os.getpid() % 250}.1"
    tokens = list(range(64))
    names = chain(tokens, 16, 4)
    stored = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": tokens,
              "block_size": 16, "lora_id": None, "medium": "GPU"}  # fmt: skip
    payload = msgspec.msgpack.encode([1.0, [stored], 0])
    context = zmq.asyncio.Context()
    replay = context.socket(zmq.ROUTER)
    replay.bind(f"tcp://{host}:5577")
    followers = Followers(lambda: None, lambda _: None)
    endpoint = Endpoint("e", "decode", host, 8000, pod="e", events=5557, replay=5577)
    followers.watch([endpoint])
    try:
        async with asyncio.timeout(20):
            client, _, first = await replay.recv_multipart()
            assert int.from_bytes(first, "big") == 0
            await replay.send_multipart([client, b"", b"other", b"junk", b""])
            await replay.send_multipart([client, b"", b"", (7).to_bytes(8, "big"), payload])
            await replay.send_multipart([client, b"", b"", (8).to_bytes(8, "big"), b"\xc1"])
            await replay.send_multipart([client, b"", b"", b"\xff" * 8, b""])
            while followers.relied != (16, frozenset({"e"})):  # noqa: ASYNC110 - the other side is ZMQ
                await asyncio.sleep(0.01)
        ((name, held),) = followers.located(names)
        assert (name, held.device) == ("e", 4)
        assert followers.state(endpoint)["namesRight"] == 1
    finally:
        followers.close()
        await asyncio.sleep(0)
        context.destroy(linger=0)
