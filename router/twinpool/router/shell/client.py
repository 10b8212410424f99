"""One client's connection: requests one after the other, answers in the same order, nothing without a bound.

A client that closes its sending side is gone, also when it could still read: a closed connection looks the same, and
workers must not write answers that nobody takes.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from twinpool.router.logic.errors import Refusal, Refused, error_body, over_limit
from twinpool.router.logic.keys import UNKNOWN_KEY
from twinpool.router.shell import routes
from twinpool.router.shell.continued import exchange_for
from twinpool.router.shell.parsing import Incoming, RequestParser

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twinpool.router.logic.headers import Header
    from twinpool.router.shell.call import Call
    from twinpool.router.shell.exchange import Exchange
    from twinpool.router.shell.pool import Pool

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NEVER = float("inf")
_HEALTH = routes.HEALTH.decode()
_TOO_MANY = Refusal(503, "too_many_clients", "The router has as many clients as it may. Try again.", retry_after=1)


def _request_ids() -> Iterator[bytes]:
    """Yield ids that nobody else has, from random bytes of which the kernel is asked for many at a time."""
    while True:
        digits = os.urandom(16 * 256).hex().encode()
        for start in range(0, len(digits), 32):
            yield digits[start : start + 32]


_ids = _request_ids()


class ClientConnection(asyncio.Protocol):
    """Serves one connection; implements :class:`twinpool.router.shell.recipient.Client`."""

    __slots__ = (
        "_clients", "_close", "_ended", "_exchange", "_head", "_held", "_in_head", "_models", "_parser", "_paused",
        "_pending", "_pending_bytes", "_pool", "_reading", "_refusal", "_route", "_transport", "deadline",
    )  # fmt: skip

    def __init__(self, pool: Pool, clients: set[ClientConnection], models: bytes) -> None:
        self._pool = pool
        self._clients = clients
        self._models = models
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._parser = RequestParser(pool.limits, self._reserve, self._admit if pool.keyring is not None else None)
        self._exchange: Exchange | None = None
        self._pending: deque[Incoming] = deque()
        self._pending_bytes = 0
        self._refusal: Refusal | None = None
        self._route = "other"
        self._close = False
        #: No further request is read; the rest is thrown away until the client closes.
        self._ended = False
        self._in_head = False
        self._head = b""
        self._paused = False
        self._reading = True
        #: Bytes of bodies accounted for in the pool.
        self._held = 0
        self.deadline = _NEVER

    # What asyncio reports.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the client, or say that there are too many."""
        self._transport = cast("asyncio.Transport", transport)
        self._clients.add(self)
        self.deadline = self._now() + self._pool.limits.idle_timeout
        if len(self._clients) > self._pool.limits.clients:
            self._refuse_and_end(_TOO_MANY)

    def data_received(self, data: bytes) -> None:
        """Read requests."""
        if self._ended:
            return
        done, refusal = self._parser.feed(data)
        self._refusal = refusal
        self._pending.extend(done)
        if self._exchange is not None:
            self._pending_bytes += len(data)
            if self._pending_bytes > self._pool.limits.pipelined and self._reading:
                self._reading = False
                self._transport.pause_reading()
        else:
            self._serve()
            if self._exchange is None:
                self._set_deadline()

    def eof_received(self) -> bool:
        """The client is gone: do not wait until what is written for it has been taken."""
        if self._exchange is not None:
            self._transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - gone is gone
        """Stop everything that was done for this client."""
        self._clients.discard(self)
        self._ended = True
        self._pending.clear()
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._count(499)
            exchange.client_gone()
        self._free()

    def pause_writing(self) -> None:
        """The client reads more slowly than the engine writes."""
        self._paused = True
        self.deadline = self._now() + self._pool.limits.write_timeout
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._paused = False
        self._set_deadline()
        if self._exchange is not None:
            self._exchange.resume()

    # What the exchange wants (twinpool.router.shell.recipient.Client).

    def begin(self, head: bytes, request_id: bytes | None) -> None:
        """Keep an answer's head until :meth:`write`, which follows at once: one system call for both."""
        close = b"Connection: close\r\n" if self._closing() else b""
        if request_id is None:
            self._head = head + close + b"\r\n"
        else:
            self._head = b"%bx-request-id: %b\r\n%b\r\n" % (head, request_id, close)
        if self._paused and self._exchange is not None:
            self._exchange.pause()

    def write(self, data: bytes) -> None:
        """Send a piece of the answer, behind its head if that was not sent yet."""
        if self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)

    def finish(self, *, close: bool) -> None:
        """The answer is complete; go on to the next request."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._count(exchange.status)
        self._next(close=close)

    def refuse(self, refusal: Refusal, request_id: bytes) -> None:
        """Answer with an error."""
        self._exchange = None
        self._send_refusal(refusal, request_id)
        self._next(close=False)

    def answer_error(self, status: int, body: bytes, request_id: bytes) -> None:
        """Answer with an engine's error."""
        self._exchange = None
        self._send(status, body, request_id)
        self._count(status)
        self._next(close=False)

    def break_off(self) -> None:
        """Cut the answer."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._count(exchange.status)
        self._transport.abort()

    # What the data process wants.

    def sweep(self, now: float) -> None:
        """End the connection when its time is over."""
        if self._exchange is not None:
            self._exchange.sweep(now)
        if now < self.deadline:
            return
        if self._exchange is None and not self._ended and (self._parser.in_head or self._parser.in_body):
            limits = self._pool.limits
            seconds = limits.head_timeout if self._parser.in_head else limits.body_timeout
            self._refuse_and_end(
                Refusal(408, "request_timeout", f"The request did not go on for {seconds:g} s; send it faster.")
            )
        else:
            self._transport.abort()

    def drain(self) -> None:
        """Close when idle; a request that runs is the connection's last."""
        if self._exchange is None and not self._parser.in_head and not self._parser.in_body:
            self._transport.close()

    @property
    def busy(self) -> bool:
        """Whether a request is running or arriving."""
        return self._exchange is not None or self._parser.in_body

    @property
    def unsent(self) -> bool:
        """Whether something written for the client has not left this process."""
        return self._transport.get_write_buffer_size() > 0

    # Serving.

    def _serve(self) -> None:
        """Serve pending requests until one takes time, then the refusal that ends the connection, if any."""
        while self._exchange is None and self._pending and not self._ended:
            incoming = self._pending.popleft()
            self._route = routes.label(incoming.target)
            self._close = self._close or not incoming.keep_alive
            if self._pool.shed > 0:
                self._pool.shed -= 1
                self._close = True
            self._serve_one(incoming)
        if self._exchange is None and not self._ended:
            if self._refusal is not None:
                self._refuse_and_end(self._refusal)
            elif self._parser.wants_continue:
                self._parser.wants_continue = False
                self._transport.write(_CONTINUE)

    def _serve_one(self, incoming: Incoming) -> None:
        request_id = next(_ids)
        pool = self._pool
        try:
            call = routes.dispatch(
                incoming,
                pool.config,
                models=self._models,
                draining=pool.draining,
                now=pool.clock(),
                new_id=request_id,
                hide_keys=pool.keyring is not None,
            )
        except Refused as error:
            self._send_refusal(error.refusal, request_id)
            self._end_or_free()
            return
        if isinstance(call, routes.Answer):
            self._send(call.status, call.body, request_id)
            self._count(call.status)
            self._end_or_free()
            return
        if call.key and not self._within_limits(call, request_id):
            return
        self.deadline = _NEVER
        exchange = self._exchange = exchange_for(pool, self, call)
        exchange.start()

    def _within_limits(self, call: Call, request_id: bytes) -> bool:
        """Count a request of an API key; one that is beyond the key's limits is refused here."""
        numbers, request, rates = self._pool.numbers, call.request, self._pool.rates
        tokens = request.prompt_tokens + request.output_tokens
        wait = 0.0 if rates is None else rates.take(call.key, tokens, self._pool.clock())
        if wait:
            numbers.add("twinpool_router_turned_away_total", ("limit",))
            self._send_refusal(over_limit(wait), request_id)
            self._end_or_free()
            return False
        numbers.add("twinpool_router_key_requests_total", (call.key,))
        numbers.add("twinpool_router_key_tokens_total", (call.key,), tokens)
        return True

    def _next(self, *, close: bool) -> None:
        self._close = self._close or close
        self._end_or_free()
        if self._ended:
            return
        self._pending_bytes = 0
        self._set_deadline()
        if self._pending or self._refusal is not None or self._parser.wants_continue:
            # Later, or a client that pipelines many small requests would grow the stack.
            self._pool.loop.call_soon(self._serve_later)
        elif not self._reading:
            self._resume_reading()

    def _serve_later(self) -> None:
        self._serve()
        if self._exchange is None and not self._ended and not self._reading:
            self._resume_reading()

    def _resume_reading(self) -> None:
        self._reading = True
        self._transport.resume_reading()

    def _end_or_free(self) -> None:
        """After an answer: give back its body's bytes, and close when it was the last one."""
        if not self._pending and not self._parser.in_body:
            self._free()
        if self._closing():
            self._end()

    def _closing(self) -> bool:
        return self._close or self._pool.draining

    def _end(self) -> None:
        """Stop reading requests; leave the client a moment to read its answer before the connection is reset."""
        if self._ended:
            return
        self._ended = True
        self._pending.clear()
        self._free()
        self.deadline = self._now() + self._pool.limits.linger
        if not self._reading:
            self._resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        elif self._refusal is None:
            self._transport.close()  # TLS says itself that the answer is complete

    def _refuse_and_end(self, refusal: Refusal) -> None:
        self._close = True
        self._route = "other"
        self._send_refusal(refusal, next(_ids))
        self._end()

    # Answers of the router's own.

    def _send_refusal(self, refusal: Refusal, request_id: bytes) -> None:
        extra = b""
        if refusal.retry_after is not None:
            extra += b"Retry-After: %d\r\n" % refusal.retry_after
        if refusal.allow is not None:
            extra += b"Allow: %b\r\n" % refusal.allow.encode()
        if refusal.status == 401:
            extra += b"WWW-Authenticate: Bearer\r\n"
        self._send(refusal.status, error_body(refusal), request_id, extra)
        self._count(refusal.status)

    def _send(self, status: int, body: bytes, request_id: bytes, extra: bytes = b"") -> None:
        if self._closing():
            extra += b"Connection: close\r\n"
        self._transport.write(
            b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\nx-request-id: %b\r\n%b\r\n%b"
            % (status, HTTPStatus(status).phrase.encode(), len(body), request_id, extra, body)
        )

    # Books.

    def _now(self) -> float:
        return self._pool.loop.time()

    def _set_deadline(self) -> None:
        """Something came or was answered: choose until when the client is waited for now."""
        limits = self._pool.limits
        if self._ended:
            return
        if self._exchange is not None:
            self.deadline = _NEVER
            return
        was_in_head, self._in_head = self._in_head, self._parser.in_head
        if self._in_head:
            if not was_in_head:  # counted from the head's beginning, whatever trickles in
                self.deadline = self._now() + limits.head_timeout
        else:
            self.deadline = self._now() + (limits.body_timeout if self._parser.in_body else limits.idle_timeout)

    def _admit(self, target: bytes, headers: Sequence[Header]) -> str | Refusal:
        """Ask for the API key before a body is held for somebody who has none."""
        keyring = self._pool.keyring
        if keyring is None:
            return ""
        name = keyring.name_of(headers)
        if name is None:
            return "" if routes.label(target) == _HEALTH else UNKNOWN_KEY
        return name

    def _reserve(self, size: int) -> bool:
        pool = self._pool
        held = pool.body_bytes + size
        if held > pool.limits.bodies:
            return False
        pool.body_bytes = held
        self._held += size
        return True

    def _free(self) -> None:
        self._pool.body_bytes -= self._held
        self._held = 0

    def _count(self, status: int) -> None:
        label = "200" if status == 200 else str(status)
        self._pool.numbers.add("twinpool_router_requests_total", (self._route, label))
