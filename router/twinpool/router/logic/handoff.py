"""The life of one request over its legs: prefill, decode, and every way in which they fail.

One function per event; each takes the state and returns the next one with the actions to carry out, in order. The
shell does exactly what the actions say and reports what comes of it. Always true, whatever happens in whatever order:

* the client gets exactly one outcome: a relayed answer, an error of ours, or a broken stream;
* handoff parameters are sent at most once, only while their lease holds and the prefill worker that made them lives:
  an engine answers a stale or used reference with another prompt's text and status 200;
* once the answer has begun, nothing is tried again but a continuation of it
  (:mod:`twinpool.router.logic.continuation`), and its client gets no other outcome than its end or a broken stream;
* KV that waits on a prefill worker is released through decode when the client is gone, not left to the lease.

A request that is not split uses the same states without the first.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from twinpool.core.protocol import KV_LEASE_SECONDS

if TYPE_CHECKING:
    from twinpool.core.protocol import OnPrefillFailure

#: Parameters older than this many seconds are not sent: the lease began before their answer arrived.
USABLE_SECONDS: Final = KV_LEASE_SECONDS - 5.0
#: Prefill legs in a row that may fail before the pool's ``onPrefillFailure`` decides; ``local`` decides after one.
PREFILL_TRIES: Final = 2
#: Prefill legs of one request in all, those that a failed decode leg or an expired lease made necessary included.
PREFILL_LIMIT: Final = 3
#: Decode legs of one request.
DECODE_TRIES: Final = 2
#: Decode workers that one answer may lose and still go on.
CONTINUATIONS: Final = 3


class Phase(Enum):
    """Where a request is."""

    #: No place at the workers yet.
    QUEUED = "queued"
    PREFILL = "prefill"
    #: A decode worker is being reached; nothing was sent yet.
    CONNECT = "connect"
    #: Sent; no answer yet.
    WAIT = "wait"
    RELAY = "relay"
    #: The client is gone, but decode must be told so that prefill's KV is freed.
    RELEASE = "release"
    DONE = "done"


class Do(Enum):
    """What the shell does next."""

    #: There is one of each: what looks them up need not call a function of Python's for it, as Enum's own hash would.
    __hash__ = object.__hash__

    START_PREFILL = "choose a prefill worker not tried before and send it the prefill leg"
    START_DECODE = "choose a decode worker and get a connection to it"
    SEND_WITH_PARAMS = "send the decode leg with the parameters, which are then forgotten"
    SEND_WHOLE = "send the client's body as it is"
    RELAY = "begin to pass the answer on"
    RESUME = "go on with an answer that has begun"
    DROP_LEG = "close the present leg at once"
    RELEASE_LEG = "close the decode leg as soon as its engine surely knows the request"
    FORGET_PARAMS = "the parameters are not used any more"
    ANSWER_UNAVAILABLE = "tell the client that no decode worker serves"
    ANSWER_FAILED = "tell the client that the workers failed"
    ANSWER_NO_PREFILL = "tell the client that no prefill worker read the prompt, and that nobody else may"
    ANSWER_AS_ENGINE = "give the client the engine's error with its own status, not as a stream with status 200"
    BREAK = "end the begun answer as an error"
    FINISH = "the answer is complete"


class State(msgspec.Struct, frozen=True):
    """Where a request is and what was tried. ``reason`` says why a request that could be split was not."""

    phase: Phase
    split: bool = False
    prefills: int = 0
    prefill_failures: int = 0
    decodes: int = 0
    #: Parameters are at hand and were not sent; ``usable_until`` is on the caller's clock.
    holding: bool = False
    usable_until: float = 0.0
    #: The decode leg was sent with parameters.
    handed_off: bool = False
    reason: str = ""
    on_prefill_failure: OnPrefillFailure = "retry-then-local"
    #: How often another worker had to go on with the answer, of which the client has a part when this is not 0.
    continuations: int = 0


Step = tuple[State, tuple[Do, ...]]


@lru_cache(maxsize=16)
def begin(split: bool, on_prefill_failure: OnPrefillFailure = "retry-then-local") -> Step:
    """A request was accepted."""
    if split:
        state = State(Phase.PREFILL, split=True, prefills=1, on_prefill_failure=on_prefill_failure)
        return state, (Do.START_PREFILL,)
    return State(Phase.CONNECT, decodes=1), (Do.START_DECODE,)


def no_prefill(state: State) -> Step:
    """There is no (other) prefill worker to choose."""
    return _without_prefill(state, state.reason or "no_prefill")


def prefill_failed(state: State, reason: str) -> Step:
    """A prefill leg brought no parameters: connection, status 5xx or 429, time-out, or an answer without any."""
    failures = state.prefill_failures + 1
    state = replace(state, prefill_failures=failures, reason=reason)
    tries = 1 if state.on_prefill_failure == "local" else PREFILL_TRIES
    if failures < tries and state.prefills < PREFILL_LIMIT:
        return replace(state, prefills=state.prefills + 1), (Do.START_PREFILL,)
    return _without_prefill(state, reason)


def prefill_refused(state: State) -> Step:
    """Prefill says that the request is bad; decode, which sees it as the client wrote it, has the word."""
    return _whole(state, "refused")


def prefill_answered(state: State, now: float) -> Step:
    """Prefill is done and its parameters are at hand."""
    held = replace(
        state,
        phase=Phase.CONNECT,
        decodes=state.decodes + 1,
        holding=True,
        usable_until=now + USABLE_SECONDS,
        prefill_failures=0,
        reason="",
    )
    return held, (Do.START_DECODE,)


def decode_connected(state: State, now: float, prefill_lives: bool) -> Step:
    """A connection to a decode worker is open."""
    fresh = state.holding and now < state.usable_until and prefill_lives
    if state.phase is Phase.RELEASE:
        done = replace(state, phase=Phase.DONE, holding=False)
        if fresh:
            return replace(done, handed_off=True), (Do.SEND_WITH_PARAMS, Do.RELEASE_LEG)
        return done, (Do.FORGET_PARAMS, Do.DROP_LEG)
    if fresh:
        return replace(state, phase=Phase.WAIT, holding=False, handed_off=True), (Do.SEND_WITH_PARAMS,)
    if not state.holding:
        return replace(state, phase=Phase.WAIT, handed_off=False), (Do.SEND_WHOLE,)
    reason = "prefill_gone" if not prefill_lives else "lease"
    stale = replace(state, holding=False, reason=reason)
    if stale.prefills < PREFILL_LIMIT:
        again = replace(stale, phase=Phase.PREFILL, prefills=stale.prefills + 1, decodes=stale.decodes - 1)
        return again, (Do.FORGET_PARAMS, Do.DROP_LEG, Do.START_PREFILL)
    if stale.on_prefill_failure == "fail":
        return replace(stale, phase=Phase.DONE), (Do.FORGET_PARAMS, Do.DROP_LEG, _told(stale, Do.ANSWER_NO_PREFILL))
    return replace(stale, phase=Phase.WAIT, handed_off=False), (Do.FORGET_PARAMS, Do.SEND_WHOLE)


def no_decode(state: State) -> Step:
    """There is no decode worker, or none of the revision whose parameters are at hand: it is just being replaced."""
    done = replace(state, phase=Phase.DONE, holding=False)
    if not state.holding:
        return done, (_told(state, Do.ANSWER_UNAVAILABLE),)
    if state.phase is Phase.RELEASE:
        return done, (Do.FORGET_PARAMS,)
    left = replace(state, holding=False, decodes=state.decodes - 1, reason="revision_gone")
    if left.prefills < PREFILL_LIMIT:
        again = replace(left, phase=Phase.PREFILL, prefills=left.prefills + 1)
        return again, (Do.FORGET_PARAMS, Do.START_PREFILL)
    whole, actions = _without_prefill(left, left.reason)
    return whole, (Do.FORGET_PARAMS, *actions)


def decode_failed(state: State) -> Step:
    """The decode leg is gone before its answer began (not connected, closed, or malformed)."""
    if state.phase is Phase.RELEASE:
        return replace(state, phase=Phase.DONE, holding=False), (Do.FORGET_PARAMS,)
    return _decode_again(state) or _give_up(state)


def decode_head(state: State, status: int, others: bool) -> Step:
    """The decode leg's answer begins with ``status``; ``others`` says whether another decode worker could be asked."""
    again = _again_after(state, status, others)
    if again is not None:
        return again[0], (Do.DROP_LEG, *again[1])
    if state.continuations:
        if status != 200:
            return replace(state, phase=Phase.DONE), (Do.DROP_LEG, Do.BREAK)
        return replace(state, phase=Phase.RELAY), (Do.RESUME,)
    return replace(state, phase=Phase.RELAY), (Do.RELAY,)


def decode_hid_error(state: State, status: int, others: bool) -> Step:
    """The decode leg began a stream with status 200 whose first event is an error that means ``status``."""
    again = _again_after(state, status, others)
    if again is not None:
        return again[0], (Do.DROP_LEG, *again[1])
    return replace(state, phase=Phase.DONE), (Do.DROP_LEG, _told(state, Do.ANSWER_AS_ENGINE))


def decode_ended(state: State) -> Step:
    """The answer was passed on to its end."""
    return replace(state, phase=Phase.DONE), (Do.FINISH,)


def decode_died(state: State, continuable: bool = False) -> Step:
    """The decode leg is gone in the middle of its answer, which another worker may go on with if it is ``continuable``.

    The rest is a request of its own, so it is split, and its legs are tried again, like any other.
    """
    if not continuable or state.continuations >= CONTINUATIONS:
        return replace(state, phase=Phase.DONE), (Do.BREAK,)
    again, actions = begin(state.split, state.on_prefill_failure)
    return replace(again, continuations=state.continuations + 1), actions


def client_gone(state: State) -> Step:
    """The client closed its connection."""
    if state.phase is Phase.CONNECT and state.holding:
        return replace(state, phase=Phase.RELEASE), ()
    done = replace(state, phase=Phase.DONE)
    if state.phase is Phase.WAIT and state.handed_off:
        return done, (Do.RELEASE_LEG,)
    return done, (Do.DROP_LEG,)


def _again_after(state: State, status: int, others: bool) -> Step | None:
    """What is tried after an error that came before the answer, None when the client gets to see it."""
    if status == 503 and others:
        return _decode_again(state)
    may_be_whole = state.handed_off and state.decodes < DECODE_TRIES and state.on_prefill_failure != "fail"
    if status >= 500 and may_be_whole:
        # Most likely the KV did not arrive. The request itself may be fine: let one worker do all of it.
        return _whole(state, "decode_error")
    return None


def _without_prefill(state: State, reason: str) -> Step:
    """No prefill worker did its part: the decode worker does all of it, or nobody does."""
    if state.on_prefill_failure == "fail":
        return replace(state, phase=Phase.DONE, holding=False, reason=reason), (_told(state, Do.ANSWER_NO_PREFILL),)
    return _whole(state, reason)


def _whole(state: State, reason: str) -> Step:
    local = replace(
        state, phase=Phase.CONNECT, decodes=state.decodes + 1, holding=False, handed_off=False, reason=reason
    )
    return local, (Do.START_DECODE,)


def _decode_again(state: State) -> Step | None:
    """Try another decode worker, if one more try is left; parameters that were not sent yet are still good for it."""
    if state.decodes >= DECODE_TRIES:
        return None
    if state.handed_off and state.prefills < PREFILL_LIMIT:
        again = replace(state, phase=Phase.PREFILL, prefills=state.prefills + 1, handed_off=False)
        return again, (Do.START_PREFILL,)
    if state.handed_off:
        return _without_prefill(state, "decode_failed")
    return replace(state, phase=Phase.CONNECT, decodes=state.decodes + 1), (Do.START_DECODE,)


def _give_up(state: State) -> Step:
    forget = (Do.FORGET_PARAMS,) if state.holding else ()
    return replace(state, phase=Phase.DONE, holding=False), (*forget, _told(state, Do.ANSWER_FAILED))


def _told(state: State, error: Do) -> Do:
    """What the client gets instead of an answer, or of the rest of one."""
    return Do.BREAK if state.continuations else error
