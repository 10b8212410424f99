"""Turns a client's bytes into complete requests, within limits and without room for smuggling.

llhttp in its strict mode (httptools' default) refuses what two HTTP parsers may read differently: both length headers,
a repeated Content-Length, folded headers, NULs, bare CR or LF, odd chunk sizes. Added here: bounds on everything, and
refusals of what this router does not do. After a refusal nothing more of that connection is read as a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import httptools
import msgspec

from twinpool.router.logic.errors import Refusal
from twinpool.router.logic.headers import VARYING

if TYPE_CHECKING:
    from twinpool.router.logic.headers import Header
    from twinpool.router.settings import Limits

_MALFORMED: Final = "The request is not valid HTTP/1.1: {}."
_TOO_BUSY: Final = Refusal(
    503, "too_many_bodies", "The router holds as many request bodies as it may. Try again shortly.", retry_after=1
)
_NO_UPGRADE: Final = Refusal(501, "no_upgrade", "This server does not switch protocols; send no Upgrade header.")


class Incoming(msgspec.Struct, frozen=True):
    """A complete request."""

    method: bytes
    target: bytes
    #: Names in lower case; ``own`` are those of :data:`twinpool.router.logic.headers.VARYING`.
    headers: tuple[Header, ...]
    own: tuple[Header, ...]
    body: bytes
    keep_alive: bool
    #: Name of the client's API key; empty where none is needed.
    key: str = ""


#: Looks at a request's target and headers before its body is read; returns the name of the client's key, or why not.
Admit = Callable[[bytes, Sequence["Header"]], "str | Refusal"]


class _Look(msgspec.Struct, frozen=True):
    """What headers say of a request, whatever its target and size."""

    refusal: Refusal | None = None
    wants_continue: bool = False


@lru_cache(maxsize=128)  # clients could send headers without end
def _look(headers: tuple[Header, ...]) -> _Look:
    """Refuse what this router does not do; all requests of a client have the same headers, but for a few."""
    given = dict(headers)
    if b"host" not in given or [name for name, _ in headers].count(b"host") > 1:
        return _Look(Refusal(400, "malformed_request", "The request must have exactly one Host header."))
    if b"upgrade" in given:
        return _Look(_NO_UPGRADE)
    if given.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
        return _Look(Refusal(501, "transfer_encoding", "The only Transfer-Encoding that is understood is chunked."))
    if given.get(b"content-encoding", b"identity").lower() != b"identity":
        return _Look(Refusal(415, "content_encoding", "Send the request body without Content-Encoding."))
    if b"expect" not in given:
        return _Look()
    if given[b"expect"].lower() != b"100-continue":
        return _Look(Refusal(417, "expectation", "The only Expect that is understood is 100-continue."))
    return _Look(wants_continue=True)


class RequestParser:
    """Parses one connection. ``reserve(n)`` asks for room for n more bytes of bodies and says whether there is any."""

    def __init__(self, limits: Limits, reserve: Callable[[int], bool], admit: Admit | None = None) -> None:
        self._admit = admit
        self._key = ""
        self._limits = limits
        self._reserve = reserve
        self._parser = httptools.HttpRequestParser(self)
        self._done: list[Incoming] = []
        self._refusal: Refusal | None = None
        #: Bytes of the head in pieces after the one that it began in, and of the present piece.
        self._head_bytes = self._piece = 0
        self._since_body = 0
        self._method = self._target = b""
        self._headers: list[Header] = []
        self._own: list[Header] = []
        self._known: tuple[Header, ...] = ()
        self._body: list[bytes] = []
        self._body_bytes = 0
        #: A request has begun and is not complete.
        self.in_head = False
        self.in_body = False
        #: The client waits for ``100 Continue`` before it sends the body.
        self.wants_continue = False

    def feed(self, data: bytes) -> tuple[list[Incoming], Refusal | None]:
        """Take bytes; return the requests that are complete now, and why reading ends, if it does."""
        self._done = []
        if self._refusal is not None:
            return [], self._refusal
        size = self._piece = len(data)
        self._since_body += size
        if self.in_head:
            self._head_bytes += size
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(Refusal(501, "no_upgrade", "This server does not switch protocols; send plain HTTP/1.1."))
        except httptools.HttpParserError as error:
            # A refusal raised by a callback stands; llhttp reports it once more as an error of its own.
            self._refuse(Refusal(400, "malformed_request", _MALFORMED.format(str(error)[:200])))
        if self.in_head or self.in_body:
            self._check_progress()
        return self._done, self._refusal

    def _check_progress(self) -> None:
        if self.in_head and self._head_bytes > self._limits.head:
            self._refuse(self._too_large_head())
        elif self.in_body and self._since_body > self._limits.head:
            self._refuse(Refusal(400, "malformed_request", _MALFORMED.format("chunk framing or trailers without end")))

    def _refuse(self, refusal: Refusal) -> None:
        if self._refusal is None:
            self._refusal = refusal

    def _too_large_head(self) -> Refusal:
        most = f"{self._limits.head} bytes or {self._limits.headers} headers"
        return Refusal(431, "headers_too_large", f"The request line and headers are more than {most}.")

    # Callbacks of httptools. After a refusal they do nothing: a pipelined rest may still be parsed.

    def on_message_begin(self) -> None:
        """A request begins."""
        self.in_head, self.in_body = True, False
        self._target, self._headers, self._own, self._body, self._body_bytes = b"", [], [], [], 0
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which is dropped."""
        if self.in_head:
            name = name.lower()
            (self._own if name in VARYING else self._headers).append((name, value))

    def on_headers_complete(self) -> None:
        """Refuse early what needs no body to be refused, and ask for the body where the client waits to be asked."""
        self.in_head, self.in_body = False, True
        self._since_body = 0
        self._method = self._parser.get_method()
        known = self._known = tuple(self._headers)
        look, length = _look(known), 0
        for name, value in self._own:
            if name == b"content-length":
                length = int(value)
        limits = self._limits
        if len(known) + len(self._own) > limits.headers or (
            # An upper bound does where the pieces that hold the head are small enough.
            self._head_bytes + self._piece > limits.head and self._head_size() > limits.head
        ):
            self._refuse(self._too_large_head())
        elif self._parser.get_http_version() != "1.1":
            self._refuse(Refusal(505, "http_version", "This server speaks HTTP/1.1 only."))
        elif look.refusal is not None:
            self._refuse(look.refusal)
        elif self._method == b"CONNECT":
            self._refuse(_NO_UPGRADE)
        elif length > limits.body:
            self._refuse(self._too_large_body())
        else:
            self.wants_continue = look.wants_continue
        if self._admit is not None and self._refusal is None:
            admitted = self._admit(self._target, known)
            if isinstance(admitted, Refusal):
                self._refuse(admitted)
            else:
                self._key = admitted

    def _head_size(self) -> int:
        """Return the size of the head."""
        return len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers + self._own)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        if self._refusal is not None:
            return
        self._since_body = 0
        size = len(piece)
        self._body_bytes += size
        if self._body_bytes > self._limits.body:
            self._refuse(self._too_large_body())
        elif not self._reserve(size):
            self._refuse(_TOO_BUSY)
        else:
            self._body.append(piece)

    def _too_large_body(self) -> Refusal:
        return Refusal(413, "body_too_large", f"The request body is larger than {self._limits.body} bytes.")

    def on_message_complete(self) -> None:
        """The request is complete."""
        self.in_head = self.in_body = self.wants_continue = False
        if self._refusal is None:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._done.append(
                Incoming(
                    self._method,
                    self._target,
                    self._known,
                    tuple(self._own),
                    body,
                    self._parser.should_keep_alive(),
                    self._key,
                )
            )
        self._body, self._headers, self._own = [], [], []
