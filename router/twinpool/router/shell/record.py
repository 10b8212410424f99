"""What is measured of one request while it runs, and written down when it ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from twinpool.router.logic.access import Entry

if TYPE_CHECKING:
    from twinpool.router.logic.asked import First
    from twinpool.router.logic.handoff import State
    from twinpool.router.shell.call import Call
    from twinpool.router.shell.legs import DecodeLeg
    from twinpool.router.shell.pool import Pool


class Record:
    """Times are on the pool's clock; 0: not yet."""

    __slots__ = (
        "_begun", "_call", "_first", "_pool", "decode", "events", "first", "foretold", "handoff", "prefill", "status",
        "trace",
    )  # fmt: skip

    def __init__(self, pool: Pool, call: Call) -> None:
        self._pool = pool
        self._call = call
        self._begun = self._first = 0.0
        self.trace = pool.tracing.begin(call, pool.clock() - call.started) if pool.tracing is not None else None
        #: What was foretold of the prefill leg, in seconds, and of the first token of the decode leg.
        self.foretold = 0.0
        self.first: First | None = None
        #: Events of a stream that have been passed on.
        self.events = 0
        #: What the client got; 499 when it left.
        self.status = 0
        #: remote, local or failed; whole for a request that cannot be split.
        self.handoff = "whole"
        #: The pods that were asked last.
        self.prefill = ""
        self.decode = ""

    def begin(self) -> None:
        """There was a place at the workers."""
        self._begun = self._pool.clock()
        if self.trace is not None:
            self.trace.admitted()

    def first_piece(self, leg: DecodeLeg, state: State, events: bool) -> None:
        """The answer to a leg begins to come, as ``events`` or in one piece."""
        now = self._first = self._pool.clock()
        numbers = self._pool.numbers
        numbers.observe("twinpool_router_time_to_first_token_seconds", now - self._call.started, self._call.route.label)
        if self.trace is not None:
            self.trace.first_piece()
        by = "remote" if state.handed_off else "local"
        seconds = max(now - leg.sent, 0.0)
        numbers.observe("twinpool_router_first_event_seconds", seconds, (by, self.decode))
        if self.first is not None and events:
            self._pool.chooser.came(leg.endpoint, self.first, seconds, now)
            if state.decodes == 1 and state.prefills == state.handed_off:  # nothing was tried twice
                foretold = self.first.seconds + (self.foretold if state.handed_off else 0.0)
                numbers.observe("twinpool_router_ttft_prediction_ratio", (now - self._begun) / foretold, (by,))

    def complete(self) -> tuple[int, float]:
        """The stream came to its end, which follows the last token at once: return its tokens and seconds apart."""
        tokens = self.events - 1  # the last event is [DONE]
        if tokens <= 1:
            return max(0, tokens), 0.0
        mean = (self._pool.clock() - self._first) / (tokens - 1)
        self._pool.numbers.observe("twinpool_router_inter_token_seconds", mean, (self.decode,))
        return tokens, mean

    def log(self, state: State) -> None:
        """The request has ended: write it down, if it is among those that are."""
        if self.trace is not None:
            tokens = self._call.request.prompt_tokens
            self.trace.end(self.status, self.handoff, state.reason, tokens, self.events)
        if not self._pool.access.wanted(self.status):
            return
        call = self._call
        self._pool.access.add(
            Entry(
                time=time.time(),
                request_id=call.forwarded.request_id.decode(),
                route=call.route.value,
                status=self.status,
                key=call.key,
                stream=call.request.stream,
                prompt_tokens=call.request.prompt_tokens,
                events=self.events,
                queued=self._begun - call.started if self._begun else None,
                first_byte=self._first - call.started if self._first else None,
                total=self._pool.clock() - call.started,
                handoff=self.handoff,
                reason=state.reason,
                prefill=self.prefill,
                decode=self.decode,
                prefill_legs=state.prefills,
                decode_legs=state.decodes,
            )
        )
