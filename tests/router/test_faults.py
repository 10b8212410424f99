"""Workers that fail and clients that leave, at every point of a request."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time

import pytest

from twinpool.router.settings import Limits

#: What clients are promised: an engine sees an abort within this many seconds.
ABORT_SECONDS = 0.2


async def pool_of(make_router, prefills=1, decodes=1, **config):
    router = await make_router(**config)
    for _ in range(prefills):
        await router.engine("prefill")
    for _ in range(decodes):
        await router.engine("decode")
    return router


@pytest.mark.parametrize("fault", ["reset", "500", "503", "refused", "no_params", "cut", "garbage", "429"])
async def test_one_of_two_prefill_workers_fails_and_no_client_notices(make_router, kit, fault):
    router = await pool_of(make_router, prefills=2)
    bad = router.engines[0]
    if fault == "refused":
        await bad.stop()
    else:
        bad.script = {
            "reset": kit.reset,
            "500": kit.always(kit.response(b"{}", "500 X")),
            "503": kit.always(kit.response(b"{}", "503 X")),
            "429": kit.always(kit.response(b"{}", "429 X")),
            "no_params": kit.always(kit.response(b'{"kv_transfer_params":null}')),
            "cut": kit.always(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{}", close=True),
            "garbage": kit.always(b"220 ftp ready\r\n\r\n"),
        }[fault]
    for _ in range(12):
        answer = await router.ask(kit.post(kit.STREAM))
        assert (answer.status, answer.body) == (200, b"".join(kit.EVENTS))
    assert router.value("handoffs_total", "remote", "") == 12
    assert router.value("retries_total", "prefill") >= 1
    await router.idle()


async def test_without_any_prefill_worker_decode_does_all_of_it_and_it_is_counted(make_router, kit):
    router = await pool_of(make_router, prefills=2)
    for engine in router.engines[:2]:
        engine.script = kit.reset
    answer = await router.ask(kit.post(kit.STREAM))
    assert (answer.status, answer.body) == (200, b"".join(kit.EVENTS))
    assert router.engines[2].requests[-1].json == kit.STREAM
    assert router.value("handoffs_total", "local", "connection_lost") == 1
    del router.engines[:2]
    router.publish()
    assert (await router.ask(kit.post(kit.STREAM))).status == 200
    assert router.value("handoffs_total", "local", "no_prefill") == 1


async def test_a_request_that_prefill_refuses_gets_decodes_own_words(make_router, kit):
    router = await pool_of(make_router)
    prefill, decode = router.engines
    prefill.script = kit.always(kit.response(b'{"error":"prefill"}', "400 Bad Request"))
    decode.script = kit.always(kit.response(b'{"error":"decode, exactly"}', "400 Bad Request"))
    answer = await router.ask(kit.post(kit.STREAM))
    assert (answer.status, answer.body) == (400, b'{"error":"decode, exactly"}')
    assert router.value("requests_total", "/v1/completions", "400") == 1


async def test_a_slow_prefill_worker_is_given_up(make_router, kit):
    router = await pool_of(make_router, limits=Limits(prefill_timeout=0.1))
    router.engines[0].script = kit.hang
    asked = asyncio.ensure_future(router.ask(kit.post(kit.STREAM)))

    def swept() -> bool:
        for client in list(router.clients):
            client.sweep(router.loop.time())
        return asked.done()

    await kit.until(swept)
    assert (await asked).status == 200
    assert router.value("handoffs_total", "local", "timeout") == 1
    await kit.until(lambda: router.engines[0].requests[0].aborted.is_set())


async def test_an_endless_prefill_answer_is_not_kept(make_router, kit):
    router = await pool_of(make_router, limits=Limits(prefill_answer=1000))
    router.engines[0].script = kit.always(kit.response(b"x" * 5000))
    assert (await router.ask(kit.post(kit.STREAM))).status == 200
    assert router.value("handoffs_total", "local", "answer_too_large") == 1


async def test_a_chunked_prefill_answer_is_understood(router, kit):
    answer = json.dumps({"kv_transfer_params": kit.PARAMS}).encode()
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    router.engines[0].script = kit.always(head + kit.chunk(answer[:9]) + kit.chunk(answer[9:]) + b"0\r\n\r\n")
    await router.ask(kit.post(kit.STREAM))
    assert router.engines[1].requests[0].json["kv_transfer_params"] == kit.PARAMS


async def test_sent_parameters_are_not_replayed_when_decode_dies(make_router, kit):
    router = await pool_of(make_router, decodes=2)
    numbers = iter(range(100))

    async def numbered(engine, seen):
        params = {**kit.PARAMS, "remote_request_id": str(next(numbers))}
        seen.writer.write(kit.response(json.dumps({"kv_transfer_params": params}).encode()))

    router.engines[0].script = numbered
    router.engines[1].script = kit.reset
    for _ in range(6):
        assert (await router.ask(kit.post(kit.STREAM))).status == 200
    used = [r.json["kv_transfer_params"]["remote_request_id"] for e in router.engines[1:] for r in e.requests]
    assert len(used) == len(set(used)) >= 7
    await router.idle()


async def test_a_failed_kv_load_is_served_whole(router, kit):
    async def fail_handoffs(engine, seen):
        if "kv_transfer_params" in seen.json:
            seen.writer.write(kit.response(b'{"error":"KV load"}', "500 X"))
        else:
            await kit.answer_normally(engine, seen)

    router.engines[1].script = fail_handoffs
    answer = await router.ask(kit.post(kit.STREAM))
    assert (answer.status, answer.body) == (200, b"".join(kit.EVENTS))
    assert router.value("handoffs_total", "local", "decode_error") == 1


async def test_an_engines_error_passes_through_when_nobody_else_can_help(make_router, kit):
    router = await pool_of(make_router, prefills=0)
    for status in ("500 Internal Server Error", "503 Service Unavailable", "429 Too Many Requests"):
        router.engines[0].script = kit.always(kit.response(b'{"why":"mine"}', status))
        answer = await router.ask(kit.post(kit.STREAM))
        assert (answer.status, answer.body) == (int(status[:3]), b'{"why":"mine"}')
        assert len(router.engines[0].requests) == 1
        router.engines[0].requests.clear()


async def test_a_503_is_asked_of_another_worker(make_router, kit):
    router = await pool_of(make_router, prefills=0, decodes=2)
    router.engines[0].script = kit.always(kit.response(b"{}", "503 X"))
    for _ in range(4):
        assert (await router.ask(kit.post(kit.STREAM))).status == 200
    assert router.value("retries_total", "decode") >= 1


async def test_when_all_decode_workers_fail_the_client_gets_502(make_router, kit):
    router = await pool_of(make_router, prefills=0, decodes=2)
    for engine in router.engines:
        engine.script = kit.reset
    answer = await router.ask(kit.post(kit.STREAM))
    assert answer.status == 502
    assert answer.error["code"] == "worker_failed"
    for engine in router.engines:
        await engine.stop()
    assert (await router.ask(kit.post(kit.STREAM))).status == 502


@pytest.mark.parametrize("cut_in_chunk", [False, True])
async def test_death_in_a_stream_ends_it_with_an_error_event(router, kit, cut_in_chunk):
    sent = kit.SSE_HEAD + kit.chunk(kit.EVENTS[0]) + (kit.chunk(kit.EVENTS[1])[:-9] if cut_in_chunk else b"")

    async def die(engine, seen):
        seen.writer.write(sent)
        await seen.writer.drain()
        await asyncio.sleep(0.01)
        await kit.reset(engine, seen)

    router.engines[1].script = die
    answer = await router.ask(kit.post(kit.STREAM))
    assert answer.status == 200
    assert answer.body.startswith(kit.EVENTS[0])
    last = answer.body.rstrip(b"\n").rpartition(b"\n\n")[2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_lost"
    assert b"[DONE]" not in answer.body
    assert len(router.engines[1].requests) == 1
    assert router.value("broken_streams_total") == 1


@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1",
    ],
)
async def test_any_other_answer_that_is_cut_is_seen_to_be_cut(router, kit, begun):
    async def die(engine, seen):
        seen.writer.write(begun)
        await seen.writer.drain()
        await asyncio.sleep(0.02)
        await kit.reset(engine, seen)

    router.engines[1].script = die
    client = await router.connect()
    client.send(kit.post(kit.STREAM))
    rest = await client.rest()
    assert not rest.endswith(b"0\r\n\r\n")
    assert b"worker_lost" not in rest
    assert len(router.engines[1].requests) == 1


async def test_an_answer_that_ends_with_its_connection(router, kit):
    router.engines[1].script = kit.always(b"HTTP/1.1 200 OK\r\nContent-Type: x/y\r\n\r\nuntil the end", close=True)
    client = await router.connect()
    client.send(kit.post(kit.STREAM))
    rest = await client.rest()
    assert rest.endswith(b"\r\n\r\nuntil the end")


async def test_interim_answers_of_an_engine_are_not_passed_on(router, kit):
    router.engines[1].script = kit.always(b"HTTP/1.1 102 Processing\r\n\r\n" + kit.SSE)
    assert (await router.ask(kit.post(kit.STREAM))).body == b"".join(kit.EVENTS)


async def test_an_engine_that_talks_out_of_turn_loses_its_connection(router, kit):
    router.engines[1].script = kit.always(kit.SSE + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
    client = await router.connect()
    for _ in range(3):
        client.send(kit.post(kit.STREAM))
        assert (await client.answer()).body == b"".join(kit.EVENTS)
    assert router.engines[1].connections == 3


async def test_a_restarted_prefill_workers_references_are_dropped(make_router, kit):
    router = await pool_of(make_router, prefills=1, decodes=1)
    prefill, decode = router.engines
    connect = router.pool.connections.connect

    async def restart_meanwhile(endpoint):
        if endpoint.role == "decode" and len(prefill.requests) == 1:
            router.pool.update([prefill.endpoint(identity="prefill-0/1"), decode.endpoint()])
        return await connect(endpoint)

    router.pool.connections.connect = restart_meanwhile
    assert (await router.ask(kit.post(kit.STREAM))).status == 200
    assert len(prefill.requests) == 2
    assert len(decode.requests) == 1
    assert router.value("handoffs_total", "remote", "") == 1


# Clients that leave.


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("where", ["prefill", "decode", "stream"])
async def test_a_client_that_leaves_stops_its_worker(router, kit, where, how):
    prefill, decode = router.engines
    engine = prefill if where == "prefill" else decode

    async def stream_for_ever(engine, seen):
        seen.writer.write(kit.SSE_HEAD)
        while True:
            seen.writer.write(kit.chunk(kit.EVENTS[0]))
            await seen.writer.drain()
            await asyncio.sleep(0.01)

    engine.script = stream_for_ever if where == "stream" else kit.hang
    client = await router.connect()
    client.send(kit.post(kit.STREAM))
    await kit.until(lambda: engine.requests)
    if where == "stream":
        await client.reader.readuntil(b"t0")
    started = time.monotonic()
    getattr(client, how)()
    await asyncio.wait_for(engine.requests[-1].aborted.wait(), kit.DEADLINE)
    assert time.monotonic() - started < ABORT_SECONDS + 0.3, "the machine may be busy; the bound without it is 0.2 s"
    phase = {"prefill": "prefill", "decode": "wait", "stream": "relay"}[where]
    await kit.until(lambda: router.value("client_aborts_total", phase) == 1)
    await kit.until(lambda: router.value("requests_total", "/v1/completions", "499") == 1)
    await router.idle()


async def test_a_client_that_leaves_between_the_hops_lets_decode_free_the_kv(router, kit):
    _, decode = router.engines
    decode.script = kit.hang
    connect = router.pool.connections.connect
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def slow(endpoint):
        if endpoint.role == "decode":
            entered.set()
            await go_on.wait()
        return await connect(endpoint)

    router.pool.connections.connect = slow
    client = await router.connect()
    client.send(kit.post(kit.STREAM))
    await entered.wait()
    assert router.pool.ledger["prefill-0"].unpulled == 1
    client.abort()
    await kit.until(lambda: router.value("client_aborts_total", "connect") == 1)
    go_on.set()
    await kit.until(lambda: decode.requests)
    assert decode.requests[0].json["kv_transfer_params"] == kit.PARAMS
    await asyncio.wait_for(decode.requests[0].aborted.wait(), kit.DEADLINE)
    await router.idle()


async def test_a_client_that_does_not_read_holds_its_worker_back(router, kit):
    sent = 0

    async def flood(engine, seen):
        nonlocal sent
        seen.writer.write(kit.SSE_HEAD)
        for _ in range(4000):
            seen.writer.write(kit.chunk(b"x" * 16384))
            await seen.writer.drain()
            sent += 1

    router.engines[1].script = flood
    client = await router.connect()
    client.writer.transport.pause_reading()
    client.send(kit.post(kit.STREAM))
    last = -1
    while last != sent or sent == 0:
        last = sent
        await asyncio.sleep(0.15)
    assert sent < 3500, "the engine was held back by what socket buffers do not take"
    client.writer.transport.resume_reading()
    got = len(await client.reader.read(2**20))
    while got < 4000 * 16384:
        piece = await client.reader.read(2**20)
        assert piece
        got += len(piece)
    await kit.until(lambda: sent == 4000)


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("step", [1, 2, 7, 64])
async def test_recorded_answers_reach_the_client_to_the_byte(router, kit, step, close):
    """The engine's bytes, split anywhere, are the client's bytes."""
    body = b"".join(kit.chunk(e) for e in kit.EVENTS)
    head = b"HTTP/1.1 200 OK\r\ndate: x\r\nX-Request-ID: engine\r\ncontent-type: text/event-stream\r\n"
    answers = [
        head + b"transfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n",
        head + b"transfer-encoding: chunked\r\n\r\n" + body + b"0;x=y\r\nX-Trailer: 1\r\n\r\n",
        head + b"content-length: 11\r\n\r\nhello world",
        b"HTTP/1.1 204 No Content\r\nx-request-id: e\r\n\r\n",
    ]
    for raw in answers:

        async def dribble(engine, seen, raw=raw):
            seen.writer.get_extra_info("socket").setsockopt(6, 1, 1)
            for start in range(0, len(raw), step):
                seen.writer.write(raw[start : start + step])
                await seen.writer.drain()
                await asyncio.sleep(0)

        router.engines[1].script = dribble
        client = await router.connect()
        client.send(kit.post(kit.STREAM, headers="Connection: close\r\n" if close else ""))
        if close:
            got = await client.rest()
            assert got.replace(b"Connection: close\r\n", b"") == raw
        else:
            got = await asyncio.wait_for(client.reader.readexactly(len(raw)), kit.DEADLINE)
            assert got == raw


async def test_suspects_are_used_when_nobody_else_is_left(make_router, kit):
    router = await pool_of(make_router, prefills=0, decodes=1)
    router.engines[0].script = kit.reset
    assert (await router.ask(kit.post(kit.STREAM))).status == 502
    router.engines[0].script = kit.answer_normally
    assert (await router.ask(kit.post(kit.STREAM))).status == 200


async def test_an_endpoint_that_is_not_admitted_gets_nothing(make_router, kit):
    router = await pool_of(make_router, prefills=0, decodes=2)
    first, second = router.engines
    router.pool.update([dataclasses.replace(first.endpoint(), admitted=False), second.endpoint()])
    for _ in range(6):
        await router.ask(kit.post(kit.STREAM))
    assert (len(first.requests), len(second.requests)) == (0, 6)
