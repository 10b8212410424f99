"""HTTP as clients really send it: in pieces, in a row, too large, broken."""

import asyncio
import json

import pytest

BODY = json.dumps({"model": "m", "prompt": "hi", "max_tokens": 3, "ignore_eos": True}).encode()
REQUEST = b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


async def answers(reader, count):
    """Return the status lines and bodies of ``count`` answers with a length."""
    got = []
    for _ in range(count):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        got.append((int(head.split()[1]), await reader.readexactly(length)))
    return got


async def talk(engine, *pieces, count=1):
    reader, writer = await asyncio.open_connection(engine.host, 8000)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    got = await answers(reader, count)
    return got, reader, writer


async def test_a_request_may_come_byte_by_byte(engines):
    engine = await engines()
    whole, _, first = await talk(engine, REQUEST)
    split, _, second = await talk(engine, *(REQUEST[at : at + 1] for at in range(len(REQUEST))))
    assert split[0][0] == 200
    assert json.loads(split[0][1])["choices"] == json.loads(whole[0][1])["choices"]
    first.close()
    second.close()


async def test_pipelined_requests_are_answered_in_order(engines):
    engine = await engines()
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    got, _, writer = await talk(engine, REQUEST + health + REQUEST + health, count=4)
    assert [status for status, _ in got] == [200] * 4
    assert [bool(body) for _, body in got] == [True, False, True, False]
    writer.close()


async def test_a_chunked_body_and_an_invitation(engines):
    engine = await engines()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    reader, writer = await asyncio.open_connection(engine.host, 8000)
    writer.write(head)
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
    assert (await answers(reader, 1))[0][0] == 200
    writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 3000\r\n\r\n" + b"a" * 3000, 413),
        (b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ],
)
async def test_what_cannot_be_served_is_refused_and_closed(engines, sent, status):
    engine = await engines("--max-body-bytes", "2000")
    got, reader, writer = await talk(engine, sent)
    assert got[0][0] == status
    assert json.loads(got[0][1])["error"]["code"] == status
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
    assert (await engine.get("/health"))[0] == 200


async def test_an_offer_to_change_protocols_is_declined_by_answering(engines):
    engine = await engines()
    offer = b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n"
    got, reader, writer = await talk(engine, offer)
    assert got == [(200, b"")]
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


async def test_a_client_may_ask_to_close(engines):
    engine = await engines()
    _, reader, writer = await talk(engine, b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


@pytest.mark.parametrize(
    "message", [b"\xff" * 4, b"\x00\x00\x00\x01\x01", b"\x00\x00\x00\x01\x80", b"\x00\x00\x00\x05\x81\xa2op\xa1x"]
)
async def test_the_side_channel_closes_on_what_is_no_message(engines, message):
    engine = await engines("--connector", "nixl")
    reader, writer = await asyncio.open_connection(engine.host, 5600)
    writer.write(message + b"\x00")
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()
