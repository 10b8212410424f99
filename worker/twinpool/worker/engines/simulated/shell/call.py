"""One completion call: submits its orders, and turns their tokens into one answer or one stream."""

from __future__ import annotations

import functools
import os
import secrets
import signal
import time
from typing import TYPE_CHECKING

import msgspec

from twinpool.worker.engines.simulated.logic.answers import Choice, Json, Reply
from twinpool.worker.engines.simulated.logic.sequence import Failed, FinishReason, Order, Token

if TYPE_CHECKING:
    from twinpool.worker.engines.simulated.logic.calls import Call
    from twinpool.worker.engines.simulated.logic.faults import Faults
    from twinpool.worker.engines.simulated.shell.driver import Driver
    from twinpool.worker.engines.simulated.shell.http import Exchange

_encoder = msgspec.json.Encoder()


def encode(body: Json) -> bytes:
    """Return JSON."""
    return _encoder.encode(body)


class RunningCall:
    """A call from its start to its last byte, or to the client's leaving."""

    def __init__(
        self, call: Call, reply: Reply, exchange: Exchange, driver: Driver, faults: Faults, among: set[RunningCall]
    ) -> None:
        self._call = call
        self._reply = reply
        self._exchange = exchange
        self._driver = driver
        self._faults = faults
        self._among = among
        self._choices = [Choice(call.stops) for _ in range(len(call.prompts) * call.n)]
        self._ids = [f"{reply.id}-{index}-{secrets.token_hex(4)}" for index in range(len(self._choices))]
        self._unfinished = len(self._choices)
        self._tokens = 0
        self._over = False

    def start(self, submit: bool) -> None:
        """Submit the orders, or end each at once without a token; what comes out is sent as it comes."""
        self._among.add(self)
        self._exchange.on_gone = self.cancel
        if self._call.stream:
            self._exchange.open_stream("text/event-stream; charset=utf-8")
            if self._call.kind == "chat":
                for index in range(len(self._choices)):
                    self._event(self._reply.opening(index))
        if not submit:
            self.end()
            return
        for index, order_id in enumerate(self._ids):
            self._driver.submit(self._order(index, order_id), functools.partial(self._hear, index))

    def _order(self, index: int, order_id: str) -> Order:
        call, prompt = self._call, index // self._call.n
        return Order(
            id=order_id,
            prompt=call.prompts[prompt],
            max_tokens=call.max_tokens[prompt],
            min_tokens=call.min_tokens,
            ignore_eos=call.ignore_eos,
            stop_token_ids=call.stop_token_ids,
            hand_over=call.hand_over,
            remote=call.remote,
            salt=call.salt,
            adapter=call.adapter,
        )

    def cancel(self) -> None:
        """The client left: nothing more is computed for it."""
        self._stop()
        for order_id in self._ids:
            self._driver.abort(order_id)

    def end(self, reason: FinishReason = "abort") -> None:
        """The engine is going away: end every answer where it stands."""
        for index, choice in enumerate(self._choices):
            if not self._over and choice.finish is None:
                self._driver.abort(self._ids[index], reason)
                self._show(index, choice.end(reason), [])

    def _hear(self, index: int, event: Token | Failed) -> None:
        if self._over:
            return
        if isinstance(event, Failed):
            self._fail(event)
            return
        choice = self._choices[index]
        text = choice.feed(event)
        if choice.finish is not None and event.finish is None:
            self._driver.abort(event.id, "stop")
        self._tokens += 1
        if not self._breaks():
            self._show(index, text, [event.token])

    def _breaks(self) -> bool:
        """Apply the faults that break off an answer in the middle."""
        if self._faults.die_after is not None and self._tokens > self._faults.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._faults.stall_after is not None and self._tokens > self._faults.stall_after:
            self._driver.stall()
        if self._faults.reset_after is not None and self._tokens > self._faults.reset_after:
            self._exchange.reset()
            return True
        return False

    def _show(self, index: int, text: str, tokens: list[int]) -> None:
        choice = self._choices[index]
        if self._call.stream and (text or choice.finish is not None or self._call.token_ids):
            self._event(self._reply.piece(index, text, choice, tokens))
        if choice.finish is not None:
            self._unfinished -= 1
            if not self._unfinished:
                self._complete()

    def _stop(self) -> None:
        self._over = True
        self._among.discard(self)

    def _complete(self) -> None:
        self._stop()
        if not self._call.stream:
            self._exchange.respond(200, encode(self._reply.whole(self._choices)))
            return
        if self._call.include_usage:
            self._event(self._reply.closing(self._choices))
        self._exchange.send(b"data: [DONE]\n\n")
        self._exchange.close()

    def _fail(self, failed: Failed) -> None:
        """Answer with HTTP 500, or inside a stream with an error event, as vLLM does; the other orders end too."""
        self.cancel()
        error = {"message": failed.problem, "type": "InternalServerError", "param": None, "code": 500}
        body = encode({"error": error})
        if self._call.stream:
            self._exchange.send(b"data: " + body + b"\n\ndata: [DONE]\n\n")
            self._exchange.close()
        else:
            self._exchange.respond(500, body)

    def _event(self, body: Json) -> None:
        self._exchange.send(b"data: " + encode(body) + b"\n\n")


def created() -> int:
    """Return the time that answers carry, in seconds since the epoch."""
    return int(time.time())
