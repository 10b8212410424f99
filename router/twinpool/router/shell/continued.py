"""An exchange whose stream goes on at another worker when its own is lost (:mod:`twinpool.router.logic.continuation`).

A class of its own, so that a request which cannot be continued, and every pool without ``routing.continuation``, pays
nothing for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twinpool.router.logic import continuation, handoff
from twinpool.router.logic.handoff import Phase
from twinpool.router.shell.exchange import Exchange
from twinpool.router.shell.rendered import RenderedExchange

if TYPE_CHECKING:
    from twinpool.router.logic.framing import Head
    from twinpool.router.shell.call import Call
    from twinpool.router.shell.legs import DecodeLeg
    from twinpool.router.shell.pool import Pool
    from twinpool.router.shell.recipient import Client

_END = b"0\r\n\r\n"


def exchange_for(pool: Pool, client: Client, call: Call) -> Exchange:
    """Return the exchange for a request."""
    if pool.config.continuation and continuation.possible(call.route, call.request):
        return ContinuedExchange(pool, client, call)
    if pool.rendering is not None:
        return RenderedExchange(pool, client, call, pool.rendering)
    return Exchange(pool, client, call)


class ContinuedExchange(Exchange):
    """Passes on whole events, and remembers their tokens."""

    __slots__ = ("_client_paused", "_stream", "_streaming")

    def __init__(self, pool: Pool, client: Client, call: Call) -> None:
        self._stream = continuation.Stream(call.request)
        #: What comes is a stream that can be continued, not an error or an answer of another kind.
        self._streaming = False
        self._client_paused = False
        super().__init__(pool, client, replace(call, request=continuation.with_token_ids(call.request)))

    def pause(self) -> None:
        """See :class:`Exchange`; the next worker is paused too."""
        self._client_paused = True
        super().pause()

    def resume(self) -> None:
        """See :class:`Exchange`."""
        self._client_paused = False
        super().resume()

    def decode_head(self, leg: DecodeLeg, head: Head) -> None:
        """The answer, or the rest of it, begins."""
        streams = head.status == 200 and head.events and head.chunked
        if not self._state.continuations:
            # Whatever is written is whole chunks of ours.
            self._streaming, self._fill = streams, b"" if streams else None
            super().decode_head(leg, head)
            return
        others = head.status == 503 and self._others(leg)
        self._pulled()
        step = handoff.decode_head(self._state, 502 if head.status == 200 and not streams else head.status, others)
        self._streaming = streams
        if streams and self._client_paused and leg.upstream is not None:
            leg.upstream.pause_reading()
        self._apply(step)

    def decode_body(self, data: bytes) -> None:
        """A piece of the answer."""
        if not self._streaming:
            super().decode_body(data)
            return
        passed = self._stream.feed(data)
        if passed:
            super().decode_body(continuation.framed(passed))
        if self._stream.broken and self._decode is not None:
            leg = self._decode
            leg.drop()
            self.pool.failed(leg.endpoint, "lost")
            self._go_on()

    def decode_ended(self) -> None:
        """The worker has said all that it will."""
        if self._streaming and not self._stream.done:
            self._go_on()
            return
        if self._streaming:
            self._client.write(_END)
        if self._state.continuations:
            self._decode = None  # times with a gap in them teach nothing
        super().decode_ended()

    def decode_lost(self, fill: bytes | None) -> None:
        """The decode leg is gone."""
        if self._streaming and self._state.phase is Phase.RELAY:
            self._go_on()
        else:
            super().decode_lost(fill)

    def _go_on(self) -> None:
        """The worker is lost to this answer: end it, or let another worker go on."""
        self._decode = None
        self._streaming = False
        self._end_leg("lost")
        ending = self._stream.ending()
        if ending is not None:
            self.pool.numbers.add("twinpool_router_continuations_total", ("finished",))
            self._client.write(continuation.framed(ending) + _END if ending else _END)
            self._apply(handoff.decode_ended(self._state))
            return
        rest = self._stream.rest()
        if rest is not None:
            self._call = replace(self._call, request=rest)
            self._asked = self.pool.chooser.asked(rest)
        self._apply(handoff.decode_died(self._state, continuable=rest is not None))
