"""One request to one engine: its connection, its entry in the ledger, and what it reports to the exchange.

Always true: a leg's ticket is closed when the leg is, on whichever path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.router.logic.framing import Head, unchunk
from twinpool.router.logic.opening import harmless, hidden_error, undecided
from twinpool.router.logic.seats import addressed

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from twinpool.router.logic.asked import Work
    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.shell.exchange import Exchange
    from twinpool.router.shell.pool import Pool
    from twinpool.router.shell.upstream import Upstream


class _Leg:
    __slots__ = ("_pool", "_task", "_ticket", "closed", "endpoint", "upstream")

    def __init__(self, pool: Pool, endpoint: Endpoint, tokens: int, work: Work | None) -> None:
        self._pool = pool
        self.endpoint = endpoint
        ledger, seconds = pool.ledger, work.seconds if work else 0.0
        if endpoint.seat:
            self._ticket = ledger.admit_at(endpoint.seat, endpoint.id, tokens, seconds)
        else:
            self._ticket = ledger.admit(endpoint.id, tokens, seconds)
        self._task: asyncio.Task[None] | None = None
        self.upstream: Upstream | None = None
        self.closed = False

    def connect(self, connected: Callable[[], None], failed: Callable[[], None]) -> None:
        """Get a connection and report it; at once when an idle one is at hand."""
        self.upstream = self._pool.connections.take(self.endpoint)
        if self.upstream is not None:
            connected()
        else:
            self._task = self._pool.loop.create_task(self._connect(connected, failed))

    async def _connect(self, connected: Callable[[], None], failed: Callable[[], None]) -> None:
        upstream = await self._pool.connections.connect(self.endpoint)
        self._task = None
        if upstream is None:
            self.close()
            self._pool.failed(self.endpoint, "connect")
            failed()
        else:
            self.upstream = upstream
            connected()

    def close(self) -> None:
        """Take the leg out of the books; the connection is not this leg's any more."""
        self.closed = True
        self.upstream = None
        self._pool.ledger.close(self._ticket)

    def drop(self) -> None:
        """Abort the leg at once; nothing more is reported."""
        if self.closed:
            return
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self.upstream is not None:
            self.upstream.abort()
        self.close()


class PrefillLeg(_Leg):
    """Collects the short answer of a prefill worker."""

    __slots__ = ("_cost", "_exchange", "_head", "_pieces", "_size", "_started", "expected", "seconds")

    def __init__(self, exchange: Exchange, endpoint: Endpoint, tokens: int, work: Work) -> None:
        super().__init__(exchange.pool, endpoint, tokens, work)
        self._exchange = exchange
        self.expected = work
        #: Seconds that it is expected to compute, where anybody waits for them.
        self._cost = 0.0
        if self._pool.admission.bounds_prefill:
            self._cost = self._pool.chooser.computing(work, endpoint.id)
            self._pool.admission.sent(self._cost)
        #: How long it took; known at its end.
        self.seconds = 0.0
        self._head: Head | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._started = self._pool.clock()

    def send(self, head: tuple[bytes, bytes], body: bytes) -> None:
        """Send the leg, its target and header lines given as ``head``, over the open connection."""
        if self.upstream is not None:
            self.upstream.send(self, addressed(head, self.endpoint) if self.endpoint.seat else head, body)

    def close(self) -> None:
        """Take the leg out of the books, and let others go ahead."""
        if self._cost and not self.closed:
            self._pool.admission.computed(self._cost)
        super().close()

    def on_head(self, head: Head) -> None:
        """See :class:`twinpool.router.shell.upstream.Leg`."""
        self._head = head

    def on_body(self, data: bytes) -> None:
        """Collect, within the limit."""
        self._size += len(data)
        self._pieces.append(data)
        if self._size > self._pool.limits.prefill_answer:
            self.drop()
            self._exchange.prefill_failed("answer_too_large")

    def on_end(self) -> None:
        """Report the whole answer."""
        head = self._head
        assert head is not None
        self.close()
        body = b"".join(self._pieces)
        if head.status < 500:
            self._pool.succeeded(self.endpoint)
        else:
            self._pool.failed(self.endpoint, "status")
        self.seconds = self._pool.clock() - self._started
        self._pool.numbers.observe("twinpool_router_prefill_leg_seconds", self.seconds, (self.endpoint.pod,))
        self._exchange.prefill_ended(self, head.status, unchunk(body) if head.chunked else body)

    def on_lost(self, fill: bytes | None) -> None:  # noqa: ARG002 - nobody sees this answer
        """Report the loss."""
        self.close()
        self._pool.failed(self.endpoint, "lost")
        self._exchange.prefill_failed("connection_lost")

    def sweep(self, longest: float) -> None:
        """Give the worker up when it has taken more than ``longest`` seconds."""
        if self._pool.clock() - self._started > longest:
            self.drop()
            self._pool.failed(self.endpoint, "timeout")
            self._exchange.prefill_failed("timeout")


class DecodeLeg(_Leg):
    """Passes the answer of a decode worker on, piece by piece, until its exchange lets go of it.

    The head of an event stream is reported with the first event (:mod:`twinpool.router.logic.opening`).
    """

    __slots__ = ("_exchange", "_head", "_kind", "_moved", "_moved_at", "_opening", "answered", "handed_off", "sent")

    def __init__(self, exchange: Exchange, endpoint: Endpoint, tokens: int, work: Work | None) -> None:
        super().__init__(exchange.pool, endpoint, tokens, work)
        self._exchange: Exchange | None = exchange
        self.sent = 0.0
        #: A head that waits for the first event, and what came of that.
        self._head: Head | None = None
        self._opening = b""
        self.answered = False
        self.handed_off = False
        #: What a loss is counted as.
        self._kind = "lost"
        #: Whether something came since the last sweep, and when the sweep last saw that.
        self._moved = False
        self._moved_at = 0.0

    def send(self, head: tuple[bytes, bytes], body: bytes, handed_off: bool) -> None:
        """Send the leg, its target and header lines given as ``head``, over the open connection."""
        if self.upstream is not None:
            self.handed_off = handed_off
            self.sent = self._moved_at = self._pool.loop.time()
            self.upstream.send(self, addressed(head, self.endpoint) if self.endpoint.seat else head, body)

    def on_head(self, head: Head) -> None:
        """Report the beginning, or stop an answer that nobody waits for."""
        self.answered = True
        if self._exchange is None:
            self.drop()
            return
        if head.status == 200 and head.events and head.chunked:
            self._head = head
            return
        self._judge(head.status)
        self._exchange.decode_head(self, head)

    def _judge(self, status: int) -> None:
        """Feed the breaker; a 500 to a handoff says more about prefill and the way from there than about decode."""
        if status < 500:
            self._pool.succeeded(self.endpoint)
        elif status == 503 or not self.handed_off:
            self._pool.failed(self.endpoint, "status")

    def on_body(self, data: bytes) -> None:
        """Pass a piece on untouched."""
        self._moved = True
        if self._ticket.prefill:
            self._pool.ledger.prefilled(self._ticket)
        if self._head is not None:
            self._open(data)
        elif self._exchange is not None:
            self._exchange.decode_body(data)

    def _open(self, data: bytes) -> None:
        """Look at the first event, then report the head and it, or the error that it is."""
        head, exchange = self._head, self._exchange
        if head is not None and exchange is not None and not self._opening and harmless(data):
            self._head = None
            self._judge(200)
            exchange.decode_head(self, head)
            exchange.decode_body(data)
            return
        self._opening += data
        if not undecided(self._opening):
            self._report_head()

    def _report_head(self) -> None:
        head, opening = self._head, self._opening
        self._head, self._opening = None, b""
        if head is None or self._exchange is None:
            return
        error = hidden_error(opening)
        self._judge(200 if error is None else error.status)
        if error is not None:
            self._exchange.decode_hid_error(self, error)
            return
        self._exchange.decode_head(self, head)
        self._exchange.decode_body(opening)

    def on_end(self) -> None:
        """Report the end."""
        if self._head is not None:
            self._report_head()
        if self.closed:
            return
        self.close()
        if self._exchange is not None:
            self._exchange.decode_ended()

    def sweep(self, now: float, longest: float) -> None:
        """Give the worker up when nothing came for ``longest`` seconds, unless it is the client that takes nothing."""
        if self._moved or self.upstream is None or self.upstream.paused:
            self._moved, self._moved_at = False, now
        elif now - self._moved_at > longest:
            self._kind = "stall" if self.answered else "timeout"
            self.upstream.give_up()

    def on_lost(self, fill: bytes | None) -> None:
        """Report the loss."""
        self.close()
        self._pool.failed(self.endpoint, self._kind)
        if self._exchange is not None:
            self._exchange.decode_lost(fill)

    def release(self) -> None:
        """Abort once the engine surely knows the request, whose KV it then lets go on the prefill worker."""
        self._exchange = None
        if self.closed:
            return
        wait = self.sent + self._pool.limits.release_grace - self._pool.loop.time()
        if self.answered or wait <= 0:
            self.drop()
        else:
            self._pool.loop.call_later(wait, self.drop)
