"""Parsers against each other and against themselves: any bytes, split anywhere, are read in one way or refused."""

from __future__ import annotations

import asyncio
import itertools
import os
import random

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.router.logic.framing import Body, FramingError, Head, parse_head, unchunk
from twinpool.router.logic.opening import undecided
from twinpool.router.settings import Limits
from twinpool.router.shell.parsing import Incoming, RequestParser

EXPLORE = bool(os.environ.get("TWINPOOL_EXPLORE"))
SEEDS = (
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-T: 1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: r\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n1",
)
#: What mutations are made of: bytes that mean something to an HTTP parser.
PIECES = (b"\r", b"\n", b"\r\n", b" ", b":", b";", b",", b"0", b"\0", b"\t", b"\xff", b"a", b"Content-Length: 3\r\n",
          b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: x\r\n", b"HTTP/1.0", b"\r\n\r\n")  # fmt: skip


def read(data: bytes, cuts: list[int]) -> tuple[list[Incoming], int | None]:
    """Parse ``data`` cut at ``cuts``; return the requests, and the status of the refusal that ended it, if any."""
    parser = RequestParser(Limits(), lambda _: True)
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    found: list[Incoming] = []
    refusal = None
    for start, stop in itertools.pairwise(edges):
        done, refusal = parser.feed(data[start:stop])
        found += done
    return found, refusal and refusal.status


@st.composite
def mutated(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    data = bytearray(b"".join(draw(st.lists(st.sampled_from(seeds), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 3))):
        where = draw(st.integers(0, len(data)))
        data[where : where + draw(st.integers(0, 2))] = draw(st.sampled_from(PIECES) | st.binary(max_size=2))
    return bytes(data)


cut_lists = st.lists(st.integers(0, 300), max_size=12)


@settings(max_examples=600, deadline=None)
@given(mutated(SEEDS), cut_lists)
def test_how_a_request_is_split_does_not_change_how_it_is_read(data: bytes, cuts: list[int]) -> None:
    assert read(data, cuts) == read(data, [])


requests = st.lists(st.tuples(st.binary(max_size=40), st.booleans(), st.integers(1, 9)), min_size=1, max_size=4)


@given(requests, cut_lists)
def test_what_was_sent_is_what_is_read(sent: list[tuple[bytes, bool, int]], cuts: list[int]) -> None:
    """Bodies that look like requests do not become requests, however they are framed."""
    data = b""
    for body, chunked, size in sent:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\n"
        if chunked:
            pieces = [body[start : start + size] for start in range(0, len(body), size)]
            framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
            data += head + b"Transfer-Encoding: chunked\r\n\r\n" + framed
        else:
            data += head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    found, refused = read(data, cuts)
    assert ([incoming.body for incoming in found], refused) == ([body for body, _, _ in sent], None)


class Other:
    """What llhttp makes of an answer."""

    def __init__(self) -> None:
        self.body = b""
        self.complete = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BODIES = (b"3\r\nabc\r\n0\r\n\r\n", b"1;x=y\r\na\r\n0\r\nX: y\r\n\r\n", b"A\r\n0123456789\r\n1\r\n\r\r\n0\r\n\r\n")


@settings(max_examples=600, deadline=None)
@given(mutated(BODIES), cut_lists)
def test_an_answer_ends_where_another_parser_says_it_ends(data: bytes, cuts: list[int]) -> None:
    """Whatever this framing accepts, llhttp reads with the same end and the same payload."""
    body = Body(Head(200, None, True, False, True, b"", False))
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    end = -1
    try:
        for start, stop in itertools.pairwise(edges):
            end = body.feed(data[start:stop])
            if end >= 0:
                end += start
                break
    except FramingError:
        return
    if end < 0:
        return
    other = Other()
    httptools.HttpResponseParser(other).feed_data(CHUNKED + data[:end])
    assert other.complete
    assert other.body == unchunk(data[:end])
    short = Other()
    httptools.HttpResponseParser(short).feed_data(CHUNKED + data[: end - 1])
    assert not short.complete


HEADS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: a/b\r\nContent-Length: 5\r\nX-A: b\r\n\r\n",
    b"HTTP/1.1 429 Too Many Requests\r\nTransfer-Encoding: chunked\r\nRetry-After: 1\r\n\r\n",
)


@settings(max_examples=600, deadline=None)
@given(mutated(HEADS))
def test_a_head_is_understood_as_another_parser_does_or_refused(data: bytes) -> None:
    head = data[: data.find(b"\r\n\r\n") + 4]
    try:
        parsed = parse_head(head)
    except FramingError:
        return
    if parsed.status < 200 or parsed.status in (204, 304):
        return
    other = Other()
    parser = httptools.HttpResponseParser(other)
    parser.feed_data(head)
    assert parser.get_status_code() == parsed.status
    assert other.complete == (parsed.length == 0)
    if parsed.length:
        parser.feed_data(b"x" * parsed.length)
        assert other.complete
        assert len(other.body) == parsed.length


@pytest.mark.parametrize("seed", range(40) if EXPLORE else range(4))
async def test_no_bytes_of_a_client_leave_anything_behind(router, kit, seed):
    """Mutated requests over real sockets: every connection is answered in whole or closed, and the books are empty."""
    rng = random.Random(seed)
    good = (kit.post(kit.STREAM), kit.post(kit.PROMPT), *SEEDS)
    for _ in range(40):
        data = bytearray(b"".join(rng.choices(good, k=rng.randint(1, 3))))
        for _ in range(rng.randint(0, 4)):
            where = rng.randrange(len(data))
            data[where : where + rng.randint(0, 3)] = rng.choice(PIECES)
        client = await router.connect()
        cut = rng.randrange(len(data))
        client.send(bytes(data[:cut]))
        await asyncio.sleep(0)
        client.send(bytes(data[cut:]))
        if rng.random() < 0.3:
            client.abort()
            continue
        client.writer.write_eof()
        rest = await client.rest()
        assert rest == b"" or rest.startswith(b"HTTP/1.1 ")
    await kit.until(lambda: not router.clients, "every connection closed")
    await router.idle()
    assert (await router.ask(kit.post(kit.STREAM))).body == b"".join(kit.EVENTS)


async def test_a_reset_at_every_byte_of_a_request_reaches_no_worker(router, kit):
    request = kit.post(kit.STREAM)
    for cut in range(len(request)):
        client = await router.connect()
        client.send(request[:cut])
        await asyncio.sleep(0)
        client.abort()
    await kit.until(lambda: not router.clients, "every connection closed")
    await router.idle()
    assert not any(engine.requests for engine in router.engines)


async def test_a_prefill_answer_cut_at_every_byte_fails_nobody(router, kit):
    prefill = router.engines[0]
    whole = kit.response(b'{"kv_transfer_params":{"do_remote_prefill":true}}')
    client = await router.connect()
    for cut in range(len(whole)):
        prefill.script = kit.always(whole[:cut], close=True)
        client.send(kit.post(kit.STREAM))
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"".join(kit.EVENTS))
    assert not any("kv_transfer_params" in request.json for request in router.engines[1].requests)
    await router.idle()


async def test_a_decode_answer_cut_at_every_byte_never_looks_complete(router, kit):
    """Before the first event it is tried again and then an error; later the client sees what came, and that it broke.

    Nothing is sent twice once a byte has reached the client.
    """
    decode = router.engines[1]
    for cut in range(0, len(kit.SSE), 3):
        decode.requests.clear()
        decode.script = kit.always(kit.SSE[:cut], close=True)
        client = await router.connect()
        client.send(kit.post(kit.STREAM))
        if cut < len(kit.SSE_HEAD) or undecided(kit.SSE[len(kit.SSE_HEAD) : cut]):
            answer = await client.answer()
            assert (answer.status, answer.error["code"]) == (502, "worker_failed")
            assert len(decode.requests) == 2
        else:
            rest = await client.rest()
            assert rest.startswith(b"HTTP/1.1 200 OK\r\n")
            assert not rest.endswith(b"0\r\n\r\n") or b"worker_lost" in rest
            assert b"[DONE]\n\n\r\n0\r\n\r\n" not in rest
            assert len(decode.requests) == 1
        client.abort()
    await router.idle()
