"""Turns a client's bytes into complete requests, within limits and without room for smuggling.

llhttp in its strict mode (httptools' default) refuses what two HTTP parsers may read differently: both length headers,
a repeated Content-Length, folded headers, NULs, bare CR or LF, odd chunk sizes. Added here: bounds on everything, and
refusals of what this router does not do. After a refusal nothing more of that connection is read as a request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import httptools
import msgspec

from twinpool.router.logic.errors import Refusal

if TYPE_CHECKING:
    from twinpool.router.logic.headers import Header
    from twinpool.router.settings import Limits

_MALFORMED: Final = "The request is not valid HTTP/1.1: {}."
_TOO_BUSY: Final = Refusal(
    503, "too_many_bodies", "The router holds as many request bodies as it may. Try again shortly.", retry_after=1
)
#: Headers of which some values are refused.
_LOOKED_AT: Final = frozenset({b"transfer-encoding", b"content-encoding", b"expect"})


class Incoming(msgspec.Struct, frozen=True):
    """A complete request."""

    method: bytes
    target: bytes
    #: Names in lower case.
    headers: tuple[Header, ...]
    body: bytes
    keep_alive: bool
    #: Name of the client's API key; empty where none is needed.
    key: str = ""


#: Looks at a request's target and headers before its body is read; returns the name of the client's key, or why not.
Admit = Callable[[bytes, Sequence["Header"]], "str | Refusal"]


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
        self._target, self._headers, self._body, self._body_bytes = b"", [], [], 0
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the request target."""
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which is dropped."""
        if self.in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Refuse early what needs no body to be refused, and ask for the body where the client waits to be asked."""
        self.in_head, self.in_body = False, True
        self._since_body = 0
        given = dict(self._headers)
        self._method = self._parser.get_method()
        if len(self._headers) > self._limits.headers or self._head_size() > self._limits.head:
            self._refuse(self._too_large_head())
        elif self._parser.get_http_version() != "1.1":
            self._refuse(Refusal(505, "http_version", "This server speaks HTTP/1.1 only."))
        elif b"host" not in given or (len(given) < len(self._headers) and self._names().count(b"host") > 1):
            self._refuse(Refusal(400, "malformed_request", "The request must have exactly one Host header."))
        elif b"upgrade" in given or self._method == b"CONNECT":
            self._refuse(Refusal(501, "no_upgrade", "This server does not switch protocols; send no Upgrade header."))
        elif int(given.get(b"content-length", b"0")) > self._limits.body:
            self._refuse(self._too_large_body())
        elif not _LOOKED_AT.isdisjoint(given):
            self._look_closer(given)
        if self._admit is not None and self._refusal is None:
            admitted = self._admit(self._target, self._headers)
            if isinstance(admitted, Refusal):
                self._refuse(admitted)
            else:
                self._key = admitted

    def _head_size(self) -> int:
        """Return the size of the head; where the pieces that hold it are small enough, an upper bound does."""
        most = self._head_bytes + self._piece
        if most <= self._limits.head:
            return most
        return len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)

    def _names(self) -> list[bytes]:
        return [name for name, _ in self._headers]

    def _look_closer(self, given: Mapping[bytes, bytes]) -> None:
        """Refuse what headers say of the body that this router does not do."""
        if given.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            self._refuse(Refusal(501, "transfer_encoding", "The only Transfer-Encoding that is understood is chunked."))
        elif given.get(b"content-encoding", b"identity").lower() != b"identity":
            self._refuse(Refusal(415, "content_encoding", "Send the request body without Content-Encoding."))
        elif b"expect" in given:
            if given[b"expect"].lower() == b"100-continue":
                self.wants_continue = True
            else:
                self._refuse(Refusal(417, "expectation", "The only Expect that is understood is 100-continue."))

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        if self._refusal is not None:
            return
        self._since_body = 0
        self._body_bytes += len(piece)
        if self._body_bytes > self._limits.body:
            self._refuse(self._too_large_body())
        elif not self._reserve(len(piece)):
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
                    tuple(self._headers),
                    body,
                    self._parser.should_keep_alive(),
                    self._key,
                )
            )
        self._body, self._headers = [], []
