"""Streams that begin with an error, or end before their first event: the client gets an honest status."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.router.logic.opening import HiddenError, hidden_error, undecided

ERROR = b'{"error":{"message":"KV load failed","type":"InternalServerError","param":null,"code":500}}'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(body: bytes, space: bytes = b" ") -> bytes:
    return b"data:" + space + body + b"\n\n"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (chunk(event(ERROR)), HiddenError(500, ERROR)),
        (chunk(event(ERROR, b"")) + chunk(b"data: [DONE]\n\n"), HiddenError(500, ERROR)),
        (chunk(event(b'{"error":{"code":429}}')), HiddenError(429, b'{"error":{"code":429}}')),
        (chunk(event(b'{"error":{"code":"invalid"}}')), HiddenError(500, b'{"error":{"code":"invalid"}}')),
        (chunk(event(b'{"error":{"code":200}}')), HiddenError(500, b'{"error":{"code":200}}')),
        (chunk(event(b'{"error":"words"}')), None),
        (chunk(event(b'{"error":{')), None),
        (chunk(event(b'{"id":"x","error":{}}')), None),
        (chunk(event(b'{"choices":[]}')), None),
        (chunk(b": ping\n\n"), None),
        (b"0\r\n\r\n", None),
        (b"x" * 64, None),
    ],
)
def test_what_a_stream_begins_with(data: bytes, error: HiddenError | None) -> None:
    assert not undecided(data)
    assert hidden_error(data) == error


@given(st.integers(0, 200))
def test_an_error_is_not_overlooked_because_it_comes_in_pieces(cut: int) -> None:
    data = chunk(event(ERROR))
    if b"\n\n" not in data[:cut]:
        assert undecided(data[:cut])


def test_an_endless_first_event_is_passed_on() -> None:
    assert not undecided(chunk(event(b'{"error"' + b" " * 70_000))[:-10])


def failing_handoffs(kit, pieces, status=b"200 OK"):
    head = kit.SSE_HEAD.replace(b"200 OK", status)

    async def script(engine, seen):
        if "kv_transfer_params" in seen.json:
            seen.writer.write(head)
            for piece in pieces:
                seen.writer.write(piece)
                await seen.writer.drain()
                await asyncio.sleep(0.005)
        else:
            await kit.answer_normally(engine, seen)

    return script


async def test_a_stream_that_fails_to_load_its_kv_is_served_whole(router, kit):
    data = chunk(event(ERROR)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    for pieces in ([data], [data[:9], data[9:30], data[30:]]):
        router.engines[1].script = failing_handoffs(kit, pieces)
        answer = await router.ask(kit.post(kit.STREAM))
        assert (answer.status, answer.body) == (200, b"".join(kit.EVENTS))
    assert router.value("handoffs_total", "local", "decode_error") == 2
    assert not router.pool.suspects(), "a decode worker is not blamed for KV that prefill lost"
    await router.idle()


async def test_an_error_that_nothing_helps_has_its_own_status(make_router, kit):
    router = await make_router(on_prefill_failure="fail")
    for role in ("prefill", "decode"):
        await router.engine(role)
    router.engines[1].script = failing_handoffs(kit, [chunk(event(ERROR)) + b"0\r\n\r\n"])
    client = await router.connect()
    for count in (1, 2):
        client.send(kit.post(kit.STREAM, headers="X-Request-Id: abc\r\n"))
        answer = await client.answer()
        assert (answer.status, answer.body) == (500, ERROR)
        assert (answer.headers["content-type"], answer.headers["x-request-id"]) == ("application/json", "abc")
        assert len(router.engines[1].requests) == count
    assert router.value("requests_total", "/v1/completions", "500") == 2
    await router.idle()


@pytest.mark.parametrize("how", ["close", "garbage"])
async def test_a_stream_that_ends_before_its_first_event_is_tried_elsewhere(make_router, kit, how):
    router = await make_router()
    await router.engine("prefill")
    for _ in range(2):
        await router.engine("decode")
    bad = kit.SSE_HEAD + (b"zz\r\n" if how == "garbage" else b"")
    router.engines[1].script = kit.always(bad, close=True)
    for _ in range(6):
        answer = await router.ask(kit.post(kit.STREAM))
        assert (answer.status, answer.body) == (200, b"".join(kit.EVENTS))
    assert router.value("retries_total", "decode") >= 1
    assert router.value("broken_streams_total") == 0
    sent = [r.json["kv_transfer_params"] for e in router.engines[1:] for r in e.requests]
    assert len(sent) >= 7
    await router.idle()


async def test_an_empty_stream_is_passed_on(router, kit):
    router.engines[1].script = kit.always(kit.SSE_HEAD + b"0\r\n\r\n")
    answer = await router.ask(kit.post(kit.STREAM))
    assert (answer.status, answer.body) == (200, b"")


async def test_a_client_that_leaves_before_the_first_event_ends_the_work(router, kit):
    async def script(engine, seen):
        seen.writer.write(kit.SSE_HEAD + b"4")
        await seen.writer.drain()
        await engine.release.wait()

    router.engines[1].script = script
    client = await router.connect()
    client.send(kit.post(kit.STREAM))
    await kit.until(lambda: router.engines[1].requests)
    await asyncio.sleep(0.02)
    client.abort()
    await asyncio.wait_for(router.engines[1].requests[0].aborted.wait(), kit.DEADLINE)
    await router.idle()


@pytest.mark.parametrize("policy", ["retry-then-local", "local", "fail"])
async def test_what_a_pool_does_without_its_prefill_workers(make_router, kit, policy):
    router = await make_router(on_prefill_failure=policy)
    for role in ("prefill", "prefill", "decode"):
        await router.engine(role)
    for engine in router.engines[:2]:
        engine.script = kit.always(kit.response(b"{}", "500 X"))
    answer = await router.ask(kit.post(kit.STREAM))
    asked = sum(len(engine.requests) for engine in router.engines[:2])
    assert asked == (1 if policy == "local" else 2)
    if policy == "fail":
        assert (answer.status, answer.error["code"]) == (503, "no_prefill")
        assert answer.headers["retry-after"] == "1"
        assert router.value("handoffs_total", "failed", "status") == 1
        assert not router.engines[2].requests
    else:
        assert (answer.status, answer.body) == (200, b"".join(kit.EVENTS))
        assert router.value("handoffs_total", "local", "status") == 1
    whole = await router.ask(kit.post({**kit.STREAM, "n": 2}))
    assert whole.status == 200, "a request that is never split needs no prefill worker"
    assert json.loads(router.engines[2].requests[-1].body)["n"] == 2
    await router.idle()
