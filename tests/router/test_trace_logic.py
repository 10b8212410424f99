"""W3C Trace Context: which headers are believed, and what becomes of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.router.logic.headers import forward
from twinpool.router.logic.trace import Parent, line, parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{SPAN}-01".encode()


@pytest.mark.parametrize(
    ("header", "sampled"),
    [(HEADER, True), (HEADER[:-1] + b"0", False), (b"cc" + HEADER[2:] + b"-more", True), (HEADER[:-2] + b"03", True)],
)
def test_a_sane_header_is_believed(header: bytes, sampled: bool) -> None:
    assert parent(header) == Parent(int(TRACE, 16), int(SPAN, 16), sampled)


@pytest.mark.parametrize(
    "header",
    [b"", b"ff" + HEADER[2:], HEADER + b"-more", HEADER.upper(), HEADER[:-1], b" " + HEADER,
     f"00-{'0' * 32}-{SPAN}-01".encode(), f"00-{TRACE}-{'0' * 16}-01".encode()],
)  # fmt: skip
def test_anything_else_is_no_parent(header: bytes) -> None:
    assert parent(header) is None


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))
def test_a_line_is_read_as_it_was_written(trace: int, span: int) -> None:
    written = line(trace, span)
    assert written.endswith(b"\r\n")
    assert parent(written.strip().removeprefix(b"traceparent: ")) == Parent(trace, span, True)


def test_a_router_that_traces_takes_the_header_for_itself() -> None:
    headers = [(b"traceparent", HEADER), (b"tracestate", b"x=1"), (b"x-other", b"y")]
    ours = forward(headers, b"id", traces=True)
    assert ours.traceparent == HEADER
    assert b"traceparent" not in ours.prefill + ours.decode
    assert b"tracestate: x=1" in ours.prefill
    assert b"traceparent: " + HEADER in forward(headers, b"id").decode
    assert forward([*headers, headers[0]], b"id", traces=True).traceparent == b"", "two of them say nothing"
