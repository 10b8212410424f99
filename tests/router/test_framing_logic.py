"""Where answers end: any split of any answer, and everything that must not pass for one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.router.logic.framing import Body, FramingError, Head, parse_head, unchunk

CHUNKED = Head(200, None, True, True, True, b"", False)


def length(size: int) -> Head:
    return Head(200, size, False, False, True, b"", False)


def encode(chunks: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    pieces = [b"%x%b\r\n%b\r\n" % (len(c), extension, c) for c in chunks]
    return b"".join(pieces) + b"0\r\n" + trailer + b"\r\n"


def feed(body: Body, data: bytes, cuts: list[int]) -> int:
    """Feed ``data`` cut at ``cuts``; return the absolute index of the end, or -1."""
    edges = sorted({min(c, len(data)) for c in cuts} | {0, len(data)})
    for start, stop in itertools.pairwise(edges):
        end = body.feed(data[start:stop])
        if end >= 0:
            return start + end
    return -1


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.lists(st.integers(0, 300), max_size=12),
    st.sampled_from([b"", b";a=b", b";q", b';q="x y"']),
    st.sampled_from([b"", b"X-T: 1\r\n"]),
    st.binary(max_size=5),
)
def test_a_chunked_body_ends_where_it_ends(
    chunks: list[bytes], cuts: list[int], extension: bytes, trailer: bytes, rest: bytes
) -> None:
    data = encode(chunks, extension, trailer)
    assert feed(Body(CHUNKED), data + rest, cuts) == len(data)
    assert feed(Body(CHUNKED), data[:-1], cuts) == -1
    assert unchunk(data) == b"".join(chunks)


@given(st.binary(max_size=60), st.lists(st.integers(0, 70), max_size=6), st.binary(max_size=5))
def test_a_counted_body_ends_where_it_ends(data: bytes, cuts: list[int], rest: bytes) -> None:
    body = Body(length(len(data)))
    assert feed(body, data + rest, cuts) == (len(data) if data or rest else -1)
    assert body.fill() is None


def test_a_body_until_close_has_no_end() -> None:
    body = Body(Head(200, None, False, False, False, b"", False))
    assert body.until_close
    assert body.feed(b"anything") == -1


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\n",
        b"-1\r\n",
        b"0x1\r\n",
        b"\r\n",
        b"1" * 16 + b"\r\n",
        b"3\nabc",
        b"3\r\nabcX\r",
        b"3\r\nabc\rX",
        b"3\r\nabcd\r\n",
        b"1" + b" " * 2000,
        b"0\r\n" + b"X: " + b"y" * 900 + b"\r\n" * 1 + (b"X: " + b"y" * 900 + b"\r\n") * 20,
    ],
)
def test_bad_chunks_are_refused_however_they_are_split(data: bytes) -> None:
    for size in (1, 2, 3, len(data)):
        body = Body(CHUNKED)
        with pytest.raises(FramingError):  # noqa: PT012 - which piece is refused does not matter
            for start in range(0, len(data), size):
                body.feed(data[start : start + size])


@given(st.binary(min_size=1, max_size=30), st.integers(0, 60))
def test_a_cut_chunk_can_be_completed(payload: bytes, cut: int) -> None:
    data = encode([payload])[: -len(b"0\r\n\r\n")]
    cut = min(cut, len(data))
    body = Body(CHUNKED)
    body.feed(data[:cut])
    fill = body.fill()
    in_size_line = 0 < cut < data.index(b"\n") + 1
    assert (fill is None) == in_size_line
    if fill is not None:
        whole = data[:cut] + fill + b"0\r\n\r\n"
        assert feed(Body(CHUNKED), whole, []) == len(whole)
        assert len(fill) == (len(data) - cut if cut else 0)


def test_what_cannot_be_completed() -> None:
    body = Body(CHUNKED)
    body.feed(b"0\r\n")
    assert body.fill() is None
    body = Body(CHUNKED)
    body.feed(b"fffff\r\nabc")
    assert body.fill() is None


def head(lines: str, status: str = "HTTP/1.1 200 OK") -> Head:
    return parse_head(f"{status}\r\n{lines}\r\n".encode("latin-1"))


def test_a_head() -> None:
    text = "Content-Type: Text/Event-Stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
    text += "X-A:  b \r\nX-REQUEST-ID: q\r\n"
    parsed = head(text + "Connection: keep-alive\r\nKeep-Alive: timeout=5\r\n")
    assert (parsed.status, parsed.length, parsed.chunked, parsed.events) == (200, None, True, True)
    assert (parsed.keep_alive, parsed.has_request_id) == (True, True)
    assert parsed.passed == b"HTTP/1.1 200 OK\r\n" + text.encode()


def test_kinds_of_heads() -> None:
    assert head("Content-Length: 5\r\n").length == 5
    assert head("", "HTTP/1.1 204 No Content").length == 0
    assert head("", "HTTP/1.1 100 Continue").length == 0
    assert head("Content-Length: 5\r\n", "HTTP/1.1 304 X").length == 0
    assert head("").length is None
    assert not head("Connection: close\r\nContent-Length: 0\r\n").keep_alive
    assert not head("Content-Length: 0\r\n", "HTTP/1.0 200 OK").keep_alive
    assert head("Content-Length: 0\r\n", "HTTP/1.1 200").keep_alive


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 999 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA : b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1111111111111111\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n",
    ],
)
def test_bad_heads_are_refused(raw: bytes) -> None:
    with pytest.raises(FramingError):
        parse_head(raw)
