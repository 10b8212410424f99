"""Carries out what :mod:`twinpool.router.logic.handoff` decides for one request, and reports what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twinpool.router.logic import handoff
from twinpool.router.logic.errors import BROKEN, FAILED, NO_PREFILL, UNAVAILABLE, error_event
from twinpool.router.logic.handoff import Do, Phase, State
from twinpool.router.logic.request import cached_tokens, decode_body, params_of, prefill_body
from twinpool.router.logic.sessions import name_of
from twinpool.router.shell.legs import DecodeLeg, PrefillLeg
from twinpool.router.shell.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.logic.errors import Refusal
    from twinpool.router.logic.framing import Head
    from twinpool.router.logic.index_exact import Held
    from twinpool.router.logic.ledger import Ticket
    from twinpool.router.logic.opening import HiddenError
    from twinpool.router.logic.queue import Waiting
    from twinpool.router.shell.admission import Guest
    from twinpool.router.shell.call import Call
    from twinpool.router.shell.pool import Pool
    from twinpool.router.shell.recipient import Client

_DONE = Phase.DONE


class Exchange:
    """One request, from its acceptance to the one outcome that its client gets."""

    __slots__ = (
        "_admitted", "_asked", "_call", "_client", "_decode", "_events", "_fill", "_flowing", "_held", "_hidden",
        "_locating", "_params", "_prefill", "_prefill_endpoint", "_record", "_state", "_tried_decode",
        "_tried_prefill", "_until_close", "_waiting", "pool",
    )  # fmt: skip

    def __init__(self, pool: Pool, client: Client, call: Call) -> None:
        self.pool = pool
        self._client = client
        self._call = call
        session = name_of(call.forwarded.session, call.request.fields, call.key)
        self._asked = pool.chooser.asked(call.request, session, call.started)
        self._state = State(Phase.QUEUED)
        self._admitted = False
        self._waiting: Waiting[Guest] | None = None
        #: Number of the question that is put to the exact index.
        self._locating: int | None = None
        self._prefill: PrefillLeg | None = None
        self._decode: DecodeLeg | None = None
        self._prefill_endpoint: Endpoint | None = None
        self._params: bytes | None = None
        self._held: Ticket | None = None
        self._tried_prefill: tuple[str, ...] = ()
        self._tried_decode: tuple[str, ...] = ()
        self._events = self._flowing = False
        self._until_close = False
        self._fill: bytes | None = None
        self._hidden: HiddenError | None = None
        self._record = Record(pool, call)

    @property
    def status(self) -> int:
        """The status of the answer that has begun."""
        return self._record.status

    def start(self) -> None:
        """Begin, when it is known who holds the prompt and there is a place at the workers."""
        if self._asked.names:
            self._locating = self.pool.locator.ask(self._asked.names, self._located)
        if self._locating is None:
            self._enter()

    def _located(self, held: Mapping[str, Held] | None) -> None:
        self._locating = None
        if held is not None:
            self._asked = replace(self._asked, held=held)
        self._enter()

    def _enter(self) -> None:
        request = self._call.request
        self.pool.meter.arrived(self._asked.ask)
        priority = self.pool.priority(request)
        tokens = request.prompt_tokens + request.output_tokens
        self._waiting = self.pool.admission.enter(self, self._call.key, priority, tokens)

    def begin(self) -> None:
        """There is a place (:class:`twinpool.router.shell.admission.Guest`)."""
        self._admitted, self._waiting = True, None
        self._record.begin()
        pool, config = self.pool, self.pool.config
        splittable = self._call.request.splittable and config.disaggregated
        split = splittable and pool.hands_off(self._asked)
        if splittable and not split:
            self._record.handoff = "local"
            pool.numbers.add("twinpool_router_handoffs_total", ("local", config.conditional))
        self._apply(handoff.begin(split, config.on_prefill_failure))

    def turn_away(self, refusal: Refusal) -> None:
        """There will be none."""
        self._waiting = None
        self._refuse(refusal)
        self._record.log(self._state)

    # What the client's connection reports.

    def client_gone(self) -> None:
        """The client closed its connection; nothing is sent to it any more."""
        self.pool.numbers.add("twinpool_router_client_aborts_total", (self._state.phase.value,))
        self._record.status = 499
        if self._locating is not None:
            self.pool.locator.forget(self._locating)
            self._locating = None
            self._record.log(self._state)
        if self._waiting is not None:
            self.pool.admission.forget(self._waiting)
            self._waiting = None
            self._record.log(self._state)
        self._apply(handoff.client_gone(self._state))

    def pause(self) -> None:
        """The client takes no more for now."""
        if self._decode is not None and self._decode.upstream is not None:
            self._decode.upstream.pause_reading()

    def resume(self) -> None:
        """The client takes more again."""
        if self._decode is not None and self._decode.upstream is not None:
            self._decode.upstream.resume_reading()

    def sweep(self, now: float) -> None:
        """Look after workers that have fallen silent."""
        limits = self.pool.limits
        if self._prefill is not None:
            self._prefill.sweep(limits.prefill_timeout)
        if self._decode is None:
            return
        if self._state.phase is Phase.RELAY:
            self._decode.sweep(now, limits.stall_timeout)
        elif self._state.phase is Phase.WAIT:
            # An answer in one piece comes when all of it is done.
            self._decode.sweep(now, limits.first_token_timeout if self._call.request.stream else limits.answer_timeout)

    # What the legs report.

    def prefill_failed(self, reason: str) -> None:
        """The prefill leg is closed and brought nothing."""
        self._prefill = None
        self._end_leg(reason)
        self._apply(handoff.prefill_failed(self._state, reason))

    def prefill_ended(self, leg: PrefillLeg, status: int, body: bytes) -> None:
        """The prefill leg's answer is complete."""
        self._prefill = None
        if self._record.trace is not None:
            self._end_leg("" if status == 200 else str(status))
        if status == 200:
            params = params_of(body)
            if params is None:
                self._apply(handoff.prefill_failed(self._state, "no_params"))
                return
            self.pool.prefilled(leg.endpoint, leg.expected, leg.seconds, cached_tokens(body), self._asked.ask.prompt)
            self._params = params
            self._prefill_endpoint = leg.endpoint
            self._held = self.pool.ledger.hold(leg.endpoint.id)
            self._apply(handoff.prefill_answered(self._state, self.pool.loop.time()))
        elif status in (408, 429) or status >= 500:
            self._apply(handoff.prefill_failed(self._state, "status"))
        else:
            self._apply(handoff.prefill_refused(self._state))

    def decode_head(self, leg: DecodeLeg, head: Head) -> None:
        """The answer begins."""
        others = head.status == 503 and self._others(leg)
        if self._held is not None:
            self._pulled()
        step = handoff.decode_head(self._state, head.status, others)
        if step[0].phase is Phase.RELAY:
            self._record.status = head.status
            self._events = head.events
            self._until_close = head.length is None and not head.chunked
            self._client.begin(head.passed, None if head.has_request_id else self._call.forwarded.request_id)
        self._apply(step)

    def decode_hid_error(self, leg: DecodeLeg, error: HiddenError) -> None:
        """The answer began with status 200, and its first event is an error."""
        self._hidden = error
        others = error.status == 503 and self._others(leg)
        self._pulled()
        self._apply(handoff.decode_hid_error(self._state, error.status, others))

    def _others(self, leg: DecodeLeg) -> bool:
        """Whether another decode worker than that of ``leg`` could be asked."""
        revision = self._prefill_endpoint.revision if self._state.handed_off and self._prefill_endpoint else None
        return any(endpoint.id != leg.endpoint.id for endpoint in self.pool.decodes(revision))

    def decode_body(self, data: bytes) -> None:
        """A piece of the answer."""
        if not self._flowing and data:
            self._begin_to_flow()
        if self._events:
            self._record.events += data.count(b"data: ")
        self._client.write(data)

    def _begin_to_flow(self) -> None:
        if self._decode is not None:
            self._flowing = True
            self._record.first_piece(self._decode, self._state, self._events)

    def decode_ended(self) -> None:
        """The answer was passed on to its end."""
        if self._decode is not None and self._events:
            self.pool.meter.wrote(worker := self._decode.endpoint, *self._record.complete(), worker.ranks)
        self._decode = None
        if self._record.trace is not None:
            self._end_leg("" if self._record.status < 400 else str(self._record.status))
        self._apply(handoff.decode_ended(self._state))

    def decode_lost(self, fill: bytes | None) -> None:
        """The decode leg is gone."""
        self._decode = None
        self._end_leg("lost")
        if self._state.phase is Phase.RELAY:
            self._fill = fill
            self._apply(handoff.decode_died(self._state))
        else:
            self._pulled()
            self._apply(handoff.decode_failed(self._state))

    # What the state machine wants done.

    def _apply(self, step: handoff.Step) -> None:
        self._state, actions = step
        for action in actions:
            _ACTIONS[action](self)
        if self._state.phase is _DONE and self._admitted:
            self._admitted = False
            self.pool.admission.leave()
            self._record.log(self._state)

    def _start_prefill(self) -> None:
        pool = self.pool
        endpoint = pool.choose_prefill(self._asked, self._tried_prefill if self._state.prefill_failures else ())
        if endpoint is None:
            self._apply(handoff.no_prefill(self._state))
            return
        if self._state.prefills > 1:
            self.pool.numbers.add("twinpool_router_retries_total", ("prefill",))
        self._tried_prefill += (endpoint.id,)
        self._record.prefill = endpoint.pod
        if self._record.trace is not None:
            self._record.trace.begin_leg("prefill", endpoint)
        work = pool.sent(self._asked, endpoint)
        self._record.foretold = pool.chooser.expected(work, endpoint.id)
        leg = self._prefill = PrefillLeg(self, endpoint, self._call.request.prompt_tokens, work)

        def connected() -> None:
            leg.send(self._head(self._call.forwarded.prefill), prefill_body(self._call.request))

        leg.connect(connected, lambda: self.prefill_failed("connect"))

    def _start_decode(self) -> None:
        source = self._prefill_endpoint if self._state.holding else None
        revision = None if source is None else source.revision
        endpoint = self.pool.choose_decode(self._asked, revision, self._tried_decode, source)
        if endpoint is None:
            self._apply(handoff.no_decode(self._state))
            return
        if self._state.decodes > 1:
            self.pool.numbers.add("twinpool_router_retries_total", ("decode",))
        self._tried_decode += (endpoint.id,)
        self._record.decode = endpoint.pod
        if self._record.trace is not None:
            self._record.trace.begin_leg("decode", endpoint)
        request = self._call.request
        work = None
        if self._state.holding:
            self.pool.received(self._asked, endpoint)
        else:
            work = self.pool.sent(self._asked, endpoint)
        self._record.first = self.pool.chooser.first(self._asked, endpoint, work, source)
        leg = self._decode = DecodeLeg(self, endpoint, request.prompt_tokens + request.output_tokens, work)
        leg.connect(self._connected, lambda: self.decode_lost(None))

    def _connected(self) -> None:
        lives = self._prefill_endpoint is not None and self._prefill_endpoint.id in self.pool.directory.known
        self._apply(handoff.decode_connected(self._state, self.pool.loop.time(), lives))

    def _send_with_params(self) -> None:
        params, self._params = self._params, None
        assert params is not None
        self._send(params)

    def _send_whole(self) -> None:
        self._send(None)

    def _send(self, params: bytes | None) -> None:
        leg = self._decode
        assert leg is not None
        body = decode_body(self._call.request, params)
        leg.send(self._head(self._call.forwarded.decode), body, handed_off=params is not None)

    def _head(self, forwarded: bytes) -> tuple[bytes, bytes]:
        """Return the target and the header lines of a leg."""
        if self._record.trace is not None:  # whose child an engine's span is, where this router says it
            forwarded += self._record.trace.header()
        elif self._call.forwarded.traceparent:
            forwarded += b"traceparent: %b\r\n" % self._call.forwarded.traceparent
        return self._call.target, forwarded

    def _end_leg(self, error: str) -> None:
        if self._record.trace is not None:
            self._record.trace.end_leg(error)

    def _relay(self) -> None:
        if self._state.split:
            outcome = ("remote", "") if self._state.handed_off else ("local", self._state.reason)
            self._record.handoff = outcome[0]
            self.pool.numbers.add("twinpool_router_handoffs_total", outcome)

    def _drop_leg(self) -> None:
        for leg in (self._prefill, self._decode):
            if leg is not None:
                leg.drop()
        self._prefill = self._decode = None
        self._pulled()

    def _release_leg(self) -> None:
        if self._decode is not None:
            self._decode.release()
            self._decode = None
        self._pulled()

    def _forget_params(self) -> None:
        self._params = None
        self._pulled()

    def _pulled(self) -> None:
        if self._held is not None and self._params is None:
            self.pool.ledger.pulled(self._held)
            self._held = None

    def _answer_no_prefill(self) -> None:
        self._record.handoff = "failed"
        self.pool.numbers.add("twinpool_router_handoffs_total", ("failed", self._state.reason))
        self._refuse(NO_PREFILL)

    def _refuse(self, refusal: Refusal) -> None:
        self._record.status = refusal.status
        self._client.refuse(refusal, self._call.forwarded.request_id)

    def _answer_as_engine(self) -> None:
        assert self._hidden is not None
        self._record.status = self._hidden.status
        self._client.answer_error(self._hidden.status, self._hidden.body, self._call.forwarded.request_id)

    def _resume(self) -> None:
        self.pool.numbers.add("twinpool_router_continuations_total", ("resumed",))

    def _break(self) -> None:
        self.pool.numbers.add("twinpool_router_broken_streams_total")
        if self._state.continuations:
            self.pool.numbers.add("twinpool_router_continuations_total", ("failed",))
        if not self._events or self._fill is None:
            self._client.break_off()
            return
        event = b"\n\n" + error_event(BROKEN)
        self._client.write(b"%b%x\r\n%b\r\n0\r\n\r\n" % (self._fill, len(event), event))
        self._client.finish(close=True)

    def _finish(self) -> None:
        self._client.finish(close=self._until_close)


_ACTIONS: dict[Do, Callable[[Exchange], None]] = {
    Do.START_PREFILL: Exchange._start_prefill,
    Do.START_DECODE: Exchange._start_decode,
    Do.SEND_WITH_PARAMS: Exchange._send_with_params,
    Do.SEND_WHOLE: Exchange._send_whole,
    Do.RELAY: Exchange._relay,
    Do.RESUME: Exchange._resume,
    Do.DROP_LEG: Exchange._drop_leg,
    Do.RELEASE_LEG: Exchange._release_leg,
    Do.FORGET_PARAMS: Exchange._forget_params,
    Do.ANSWER_UNAVAILABLE: lambda exchange: exchange._refuse(UNAVAILABLE),
    Do.ANSWER_FAILED: lambda exchange: exchange._refuse(FAILED),
    Do.ANSWER_NO_PREFILL: Exchange._answer_no_prefill,
    Do.ANSWER_AS_ENGINE: Exchange._answer_as_engine,
    Do.BREAK: Exchange._break,
    Do.FINISH: Exchange._finish,
}
