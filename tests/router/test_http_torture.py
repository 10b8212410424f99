"""Clients that speak HTTP badly, slowly, or in bad faith."""

from __future__ import annotations

import asyncio
import json

import pytest

from twinpool.router.settings import Limits


async def test_a_request_split_at_every_byte(router, kit):
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'10;x=y\r\n{"prompt": "abc"\r\n1\r\n}\r\n0\r\nX-Trailer: 1\r\n\r\n'
    )
    plain = kit.post({"prompt": "abc"})
    client = await router.connect()
    count = 0
    for request in (plain, chunked):
        for cut in range(1, len(request)):
            client.send(request[:cut])
            await asyncio.sleep(0)
            client.send(request[cut:])
            assert (await client.answer()).status == 200
            count += 1
    assert all(r.json == {"prompt": "abc", "kv_transfer_params": kit.PARAMS} for r in router.engines[1].requests)
    assert len(router.engines[1].requests) == count


async def test_one_byte_at_a_time(router, kit):
    client = await router.connect()
    for byte in kit.post(kit.STREAM):
        client.send(bytes([byte]))
        await asyncio.sleep(0)
    assert (await client.answer()).body == b"".join(kit.EVENTS)


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n"
H = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        H + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        H + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        H + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        H + b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}",
        H + b"Content-Length: 2, 2\r\n\r\n{}",
        H + b"Content-Length: +2\r\n\r\n{}",
        H + b"Content-Length : 2\r\n\r\n{}",
        H + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        H + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        H + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        H + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        H + b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
        H + b"Transfer-Encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
        H + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}\r\n0\r\n\r\n",
        H + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}xx0\r\n\r\n",
        H + b"A: b\r\n c\r\nContent-Length: 2\r\n\r\n{}",
        H + b"A: b\0c\r\nContent-Length: 2\r\n\r\n{}",
        H + b"A: b\rContent-Length: 2\r\n\r\n{}",
        H + b": b\r\nContent-Length: 2\r\n\r\n{}",
        H + b"Host: again\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\nHost: r\nContent-Length: 2\n\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    ],
)
async def test_requests_that_could_be_read_in_two_ways_end_the_connection(router, kit, request_bytes):
    client = await router.connect()
    client.send(request_bytes + SMUGGLED)
    rest = await client.rest()
    assert rest.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 "))
    assert rest.count(b"HTTP/1.1 ") == 1
    body = json.loads(rest.partition(b"\r\n\r\n")[2])
    assert body["error"]["type"] == "invalid_request_error"
    assert b"Connection: close" in rest
    assert not any(e.requests for e in router.engines)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /health HTTP/1.0\r\nHost: r\r\n\r\n", 505),
        (b"GET /health\r\n\r\n", 505),
        (b"GET /health HTTP/1.1\r\nHost: r\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 501),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: r\r\n\r\n", 501),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (H + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 415),
        (H + b"Expect: something\r\nContent-Length: 2\r\n\r\n{}", 417),
        (H + b"Content-Length: 67108865\r\n\r\n", 413),
        (H + b"X: " + b"y" * 70_000 + b"\r\nContent-Length: 2\r\n\r\n{}", 431),
        (H + b"X: y\r\n" * 101 + b"Content-Length: 2\r\n\r\n{}", 431),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: r\r\n\r\n", 431),
    ],
)
async def test_what_is_not_done_here_is_refused_with_its_status(router, kit, request_bytes, status):
    client = await router.connect()
    client.send(request_bytes)
    assert (await client.answer()).status == status
    assert await client.rest() == b""


async def test_a_head_without_end_is_cut(router, kit):
    client = await router.connect()
    client.send(b"GET / HTTP/1.1\r\nHost: r\r\nX: ")
    for _ in range(20):
        client.send(b"y" * 65536)
        await asyncio.sleep(0.01)
    assert (await client.answer()).status == 431


async def test_a_chunked_body_over_the_limit_is_refused_before_it_is_held(make_router, kit):
    router = await make_router(Limits(body=1000))
    client = await router.connect()
    client.send(H + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(20):
        client.send(b"64\r\n" + b"x" * 100 + b"\r\n")
        await asyncio.sleep(0)
    answer = await client.answer()
    assert answer.status == 413
    assert "1000 bytes" in answer.error["message"]
    await client.rest()
    await router.idle()


async def test_trailers_without_end_are_refused(router, kit):
    client = await router.connect()
    client.send(H + b"Transfer-Encoding: chunked\r\n\r\n0\r\n")
    for _ in range(40):
        client.send(b"X: " + b"y" * 60_000 + b"\r\n")
        await asyncio.sleep(0.002)
    assert (await client.answer()).status == 400


async def test_bodies_of_all_clients_together_are_bounded(make_router, kit):
    router = await make_router(Limits(bodies=100_000))
    slow = await router.connect()
    slow.send(H + b"Content-Length: 90000\r\n\r\n" + b"x" * 80_000)
    await kit.until(lambda: router.pool.body_bytes == 80_000)
    answer = await router.ask(kit.post(b"x" * 30_000))
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    slow.abort()
    await router.idle()


async def test_too_many_clients_are_told_so(make_router, kit):
    router = await make_router(Limits(clients=3))
    clients = [await router.connect() for _ in range(3)]
    await kit.until(lambda: len(router.clients) == 3)
    extra = await router.connect()
    assert (await extra.answer()).status == 503
    clients[0].send(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
    assert (await clients[0].answer()).status == 200


async def test_slow_clients_are_timed_out(make_router, kit):
    router = await make_router(Limits(head_timeout=0.4, body_timeout=0.4, idle_timeout=0.4, linger=0.05))
    head, body, idle = [await router.connect() for _ in range(3)]
    head.send(b"GET /health HTTP/1.1\r\n")
    body.send(H + b"Content-Length: 10\r\n\r\n{")

    def sweep():
        for client in list(router.clients):
            client.sweep(router.loop.time())
        return not router.clients

    await kit.until(sweep)
    assert (await head.answer()).status == 408
    assert (await body.answer()).status == 408
    assert await idle.rest() == b""
    await router.idle()


async def test_a_head_that_trickles_does_not_buy_time(make_router, kit):
    router = await make_router(Limits(head_timeout=0.2))
    client = await router.connect()
    client.send(b"GET /health HTTP/1.1\r\n")
    await kit.until(lambda: any(c.deadline < router.loop.time() + 1 for c in router.clients))
    (connection,) = router.clients
    before = connection.deadline
    client.send(b"X: y\r\n")
    await asyncio.sleep(0.02)
    assert connection.deadline == before


async def test_a_client_that_takes_nothing_is_cut_at_last(make_router, kit):
    router = await make_router(Limits(write_timeout=0.05))
    await router.engine("decode", kit.always(kit.response(b"x" * 30_000_000)))
    client = await router.connect()
    client.writer.transport.pause_reading()
    client.send(kit.post(kit.PROMPT))

    def sweep():
        for connection in list(router.clients):
            connection.sweep(router.loop.time())
        return not router.clients

    await kit.until(sweep)
    await router.idle()


async def test_pipelined_requests_are_answered_in_order(router, kit):
    client = await router.connect()
    get = b"GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n"
    client.send(kit.post(kit.STREAM) + get + kit.post(kit.PROMPT) + kit.post({"model": "x"}) + get)
    answers = [await client.answer() for _ in range(5)]
    assert [a.status for a in answers] == [200, 200, 200, 404, 200]
    assert answers[0].body == b"".join(kit.EVENTS)
    assert answers[2].json == {"served_by": "decode-0"}
    client.send(get * 2000)
    for _ in range(2000):
        assert (await client.answer()).status == 200


async def test_a_pipelining_client_is_read_no_further_than_its_bound(make_router, kit):
    router = await make_router(Limits(pipelined=10_000))
    decode = await router.engine("decode", kit.hang)
    client = await router.connect()
    client.send(kit.post(kit.PROMPT))
    await kit.until(lambda: decode.requests)
    one = kit.post({**kit.PROMPT, "prompt": "x" * 1000})
    for _ in range(5000):
        client.send(one)
    await kit.until(lambda: router.pool.body_bytes > 10_000)
    held = -1
    while held != router.pool.body_bytes:
        held = router.pool.body_bytes
        await asyncio.sleep(0.05)
    assert held < 600_000
    decode.release.set()
    for _ in range(300):
        assert (await client.answer()).status == 200


async def test_a_good_request_before_a_bad_one_is_answered_first(router, kit):
    client = await router.connect()
    client.send(kit.post(kit.STREAM) + b"nonsense\r\n\r\n")
    assert (await client.answer()).body == b"".join(kit.EVENTS)
    assert (await client.answer()).status == 400
    assert await client.rest() == b""


async def test_expect_continue(router, kit):
    client = await router.connect()
    request = kit.post(kit.STREAM, headers="Expect: 100-continue\r\n")
    head, _, body = request.partition(b"\r\n\r\n")
    for _ in range(2):
        client.send(head + b"\r\n\r\n")
        assert (await client.answer()).status == 100
        client.send(body)
        assert (await client.answer()).body == b"".join(kit.EVENTS)
    client.send(kit.post(kit.STREAM) + head + b"\r\n\r\n")
    assert (await client.answer()).status == 200
    assert (await client.answer()).status == 100
    client.send(body)
    assert (await client.answer()).status == 200
    assert "expect" not in router.engines[1].requests[-1].headers


async def test_a_refused_body_is_not_asked_for(router, kit):
    client = await router.connect()
    client.send(H + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n")
    assert (await client.answer()).status == 413


async def test_connection_close_is_obeyed_and_announced(router, kit):
    client = await router.connect()
    client.send(kit.post(kit.STREAM, headers="Connection: close\r\n"))
    answer = await client.answer()
    assert answer.headers["connection"] == "close"
    assert await client.rest() == b""


async def test_a_half_closed_client_gets_what_needs_no_worker_and_is_gone_for_the_rest(router, kit):
    client = await router.connect()
    client.send(b"GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n")
    client.writer.write_eof()
    assert (await client.answer()).status == 200
    router.engines[0].script = kit.hang
    client = await router.connect()
    client.send(kit.post(kit.STREAM))
    await kit.until(lambda: router.engines[0].requests)
    client.writer.write_eof()
    await kit.until(lambda: router.engines[0].requests[0].aborted.is_set())


async def test_a_reset_in_the_middle_of_a_body(router, kit):
    for cut in (10, 100, 150):
        client = await router.connect()
        client.send(kit.post({**kit.PROMPT, "prompt": "x" * 1000})[:cut])
        await asyncio.sleep(0.01)
        client.abort()
    await router.idle()
    assert not any(e.requests for e in router.engines)


async def test_the_absolute_form_and_queries(router, kit):
    answer = await router.ask(b"GET http://any/v1/models?x=1 HTTP/1.1\r\nHost: r\r\n\r\n")
    assert answer.status == 200
    request = kit.post(kit.STREAM).replace(b"/v1/completions", b"http://any/v1/completions?a=b")
    assert (await router.ask(request)).status == 200
    assert router.engines[1].requests[0].target == "/v1/completions?a=b"


async def test_draining_ends_connections_but_no_request(router, kit):
    idle = await router.connect()
    idle.send(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
    await idle.answer()
    router.engines[1].script = kit.hang
    busy = await router.connect()
    busy.send(kit.post(kit.STREAM))
    await kit.until(lambda: router.engines[1].requests)
    router.pool.draining = True
    for client in list(router.clients):
        client.drain()
    assert await idle.rest() == b""
    router.engines[1].release.set()
    answer = await busy.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await busy.rest() == b""
    health = await router.ask(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
    assert health.status == 503
