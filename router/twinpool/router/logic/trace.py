"""The ``traceparent`` header of W3C Trace Context: who a request belongs to, and whether it is traced. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

#: Version, trace id, parent id, flags (W3C Trace Context, 3.2). A later version may add more behind a dash.
_SHAPE: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_SAMPLED: Final = 1


@dataclass(frozen=True, slots=True)
class Parent:
    """The span of the client that a request belongs to."""

    trace: int
    span: int
    sampled: bool


def parent(header: bytes) -> Parent | None:
    """Return what a ``traceparent`` says; None when it is absent or not to be believed."""
    match = _SHAPE.fullmatch(header)
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
        return None
    trace, span = int(match[2], 16), int(match[3], 16)
    return Parent(trace, span, bool(int(match[4], 16) & _SAMPLED)) if trace and span else None


def line(trace: int, span: int) -> bytes:
    """Return the header line, with CRLF, that makes an engine's spans children of ``span`` and has them kept."""
    return b"traceparent: 00-%032x-%016x-01\r\n" % (trace, span)
