"""Workers that answer health probes and no requests: what traffic alone shows."""

from __future__ import annotations

import asyncio
import json

from twinpool.router.settings import Limits


def sweep_until(router, test):
    def swept():
        for client in list(router.clients):
            client.sweep(router.loop.time())
        return test()

    return swept


async def pool_of(make_router, limits, decodes=1, prefills=0):
    router = await make_router(limits)
    for role, count in (("prefill", prefills), ("decode", decodes)):
        for _ in range(count):
            await router.engine(role)
    return router


async def test_a_stream_without_a_first_token_goes_to_another_worker(make_router, kit):
    router = await pool_of(make_router, Limits(first_token_timeout=0.5), decodes=2, prefills=1)
    router.engines[1].script = kit.hang
    client = await router.connect()
    client.send(kit.post(kit.STREAM) * 2)
    for _ in range(2):
        answer = asyncio.ensure_future(client.answer())
        await kit.until(sweep_until(router, answer.done))
        assert (answer.result().status, answer.result().body) == (200, b"".join(kit.EVENTS))
    assert router.value("worker_failures_total", "decode", "timeout") == 1
    assert router.pool.suspects() == {"decode-0"}
    assert all(r.json["kv_transfer_params"] for e in router.engines[1:] for r in e.requests)
    assert len(router.engines[0].requests) == 3, "prefilled again, the parameters are not sent twice"


async def test_an_answer_in_one_piece_may_take_longer_than_a_first_token(make_router, kit):
    router = await pool_of(make_router, Limits(first_token_timeout=0.01))
    router.engines[0].script = kit.hang
    client = await router.connect()
    client.send(kit.post(kit.PROMPT))
    await kit.until(lambda: router.engines[0].requests)
    await asyncio.sleep(0.05)
    sweep_until(router, lambda: True)()
    router.engines[0].release.set()
    assert (await client.answer()).status == 200
    assert router.value("worker_failures_total", "decode", "timeout") == 0


async def test_a_stream_that_stalls_is_ended_as_an_error(make_router, kit):
    router = await pool_of(make_router, Limits(stall_timeout=0.1), decodes=1)

    async def stall(engine, seen):
        seen.writer.write(kit.SSE_HEAD + kit.chunk(kit.EVENTS[0]))
        await seen.writer.drain()
        await engine.release.wait()

    router.engines[0].script = stall
    client = await router.connect()
    client.send(kit.post(kit.STREAM))
    answer = asyncio.ensure_future(client.answer())
    await kit.until(sweep_until(router, answer.done))
    last = answer.result().body.rstrip(b"\n").rpartition(b"\n\n")[2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_lost"
    assert router.value("worker_failures_total", "decode", "stall") == 1
    await asyncio.wait_for(router.engines[0].requests[0].aborted.wait(), kit.DEADLINE)
    await router.idle()


async def test_a_client_that_takes_nothing_is_no_stall_of_its_worker(make_router, kit):
    router = await pool_of(make_router, Limits(stall_timeout=0.05))
    router.engines[0].script = kit.always(kit.SSE_HEAD + kit.chunk(b"x" * 20_000_000) + b"0\r\n\r\n")
    client = await router.connect()
    client.writer.transport.pause_reading()
    client.send(kit.post(kit.STREAM))
    await kit.until(lambda: any(c._paused for c in router.clients))
    for _ in range(5):
        await asyncio.sleep(0.03)
        sweep_until(router, lambda: True)()
    assert router.value("worker_failures_total", "decode", "stall") == 0
    client.writer.transport.resume_reading()
    assert len((await client.answer()).body) == 20_000_000


async def test_a_connection_that_a_slow_client_held_back_serves_the_next_one(make_router, kit):
    """The end of an answer may come with the piece that fills the client's buffer."""
    router = await pool_of(make_router, Limits())
    engine = router.engines[0]
    assert (await router.ask(kit.post(kit.PROMPT))).status == 200
    # As the loop does when everything came in one piece: paused while the answer's last bytes are handled.
    (idle,) = router.pool.connections._idle["decode-0"]
    idle.pause_reading()
    assert router.pool.connections.take(engine.endpoint()) is idle

    class Nobody:
        def on_head(self, head):
            pass

        def on_body(self, data):
            pass

        def on_end(self):
            pass

    idle._leg, idle._body = Nobody(), None  # as after a request, which the engine would answer
    idle.data_received(b"HTTP/1.1 204 No Content\r\n\r\n")
    assert not idle.paused
    assert (await router.ask(kit.post(kit.PROMPT))).status == 200
    assert engine.connections == 1


async def test_a_worker_that_answers_500_to_whole_requests_is_avoided(make_router, kit):
    router = await pool_of(make_router, Limits(), decodes=2)
    router.engines[0].script = kit.always(kit.response(b"{}", "500 X"))
    statuses = [(await router.ask(kit.post(kit.STREAM))).status for _ in range(20)]
    assert statuses.count(500) <= 2, "one until it is suspect, one when it is tried again"
    assert router.value("worker_failures_total", "decode", "status") >= 1
