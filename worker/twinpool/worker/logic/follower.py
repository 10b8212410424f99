"""The life of a rank above 0 as a state machine: its engine has no HTTP, so everything it knows comes from its leader.

Rules that always hold:

* Its engine runs only in the run that the leader named last, and only after the leader began it.
* It is ready when its engine runs and the leader is ready, and stays so while the leader says so.
* It never restarts its engine by itself: it reports the loss, and the leader begins a new run on all ranks, with its
  own back-off and budget.
* When the pod must go, it waits for the leader to drain first, as long as the drain timeout allows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Union

from twinpool.worker.logic.causes import cause_of
from twinpool.worker.logic.events import Begin, Quit, StopEngine, Terminate, Tick, Timing
from twinpool.worker.logic.ranks import ASK_INTERVAL, SILENCE, Answer, RankState
from twinpool.worker.logic.supervisor import KILL_SECONDS, STOP_SECONDS

if TYPE_CHECKING:
    from twinpool.worker.logic.causes import Cause
    from twinpool.worker.logic.supervisor import Phase

#: Silence after which a rank that must go takes the leader for gone: it need not wait for a drain that has ended.
LEAVING_SILENCE = 3.0

#: Phases of the leader in which a run goes on.
_SERVING = ("starting", "probing", "ready", "draining")


@dataclass(frozen=True)
class Heard:
    """The leader's answer, and its address."""

    leader: str
    answer: Answer


@dataclass(frozen=True)
class Silent:
    """The leader did not answer; ``reason`` says why."""

    reason: str


@dataclass(frozen=True)
class Ended:
    """The engine's first process ended and its group is gone."""

    reason: str


@dataclass(frozen=True)
class AskLeader:
    """Tell the leader how this rank is; answer with :class:`Heard` or :class:`Silent`."""

    run: str
    state: RankState
    reason: str


@dataclass(frozen=True)
class StartRank:
    """Start the engine as a rank of the leader at this address."""

    leader: str


Event = Union[Begin, Tick, Terminate, Heard, Silent, Ended]  # noqa: UP007 - evaluated at run time
Action = Union[AskLeader, StartRank, StopEngine, Quit]  # noqa: UP007


@dataclass(frozen=True)
class State:
    """Where the rank's life stands. Times are on the caller's clock, in seconds."""

    phase: Phase = "new"
    #: The run that the leader named last; the engine's own when one runs.
    run: str = ""
    #: Whether the engine's process exists.
    running: bool = False
    #: The engine ended in this run although nobody stopped it.
    failed: bool = False
    terminating: bool = False
    forced: bool = False
    deadline: float | None = None
    #: When to ask the leader next; None while an answer is outstanding.
    next_check: float | None = None
    heard_at: float = 0.0
    #: Starts of the engine, and those but the first.
    epoch: int = 0
    started_at: float = 0.0
    start_seconds: float | None = None
    reason: str = "the leader was not asked yet"

    @property
    def ready(self) -> bool:
        """Whether the rank takes part in a group that serves."""
        return self.phase == "ready"

    @property
    def cause(self) -> Cause | None:
        """Return why its engine was lost; None while it was not lost in this run."""
        return cause_of(self.reason) if self.failed else None

    @property
    def losses(self) -> tuple[tuple[Cause, int], ...]:
        """Losses are counted by the leader."""
        return ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the leader's counters say, the leader says."""
        return ()

    @property
    def total_restarts(self) -> int:
        """Return how often the engine was started again."""
        return max(0, self.epoch - 1)

    @property
    def recent_restarts(self) -> int:
        """Return 0: the budget is the leader's."""
        return 0

    @property
    def backoff(self) -> float:
        """Return 0: so is the back-off."""
        return 0.0


Step = tuple[State, tuple[Action, ...]]


def next_wakeup(state: State) -> float | None:
    """Return the time at which :class:`Tick` is due, or None when only other events can change anything."""
    return min((time for time in (state.deadline, state.next_check) if time is not None), default=None)


def step(state: State, event: Event, now: float, timing: Timing) -> Step:
    """Return the state after ``event`` and what to do; total: an event that does not fit changes nothing."""
    if state.phase == "stopped":
        return state, ()
    if isinstance(event, Begin):
        return _join(state, now, timing, state.reason) if state.phase == "new" else (state, ())
    if isinstance(event, Tick):
        return _tick(state, now)
    if isinstance(event, Terminate):
        return _terminate(state, now, timing)
    if isinstance(event, Ended):
        return _ended(state, event, now, timing)
    if isinstance(event, Silent):
        return _silent(state, event, now)
    return _heard(state, event, now)


def _join(state: State, now: float, timing: Timing, reason: str) -> Step:
    joining = replace(
        state,
        phase="joining",
        running=False,
        forced=False,
        deadline=now + timing.startup_timeout,
        next_check=now,
        reason=reason,
    )
    return joining, ()


def _tick(state: State, now: float) -> Step:
    if state.deadline is not None and now >= state.deadline:
        return _deadline(state, now)
    if state.next_check is None or now < state.next_check:
        return state, ()
    return replace(state, next_check=None), (_question(state),)


def _question(state: State) -> AskLeader:
    if state.failed:
        return AskLeader(state.run, "failed", state.reason)
    if state.terminating:
        return AskLeader(state.run, "leaving", "")
    return AskLeader(state.run, "running" if state.running else "waiting", "")


def _deadline(state: State, now: float) -> Step:
    if state.phase == "draining":
        return _stop(replace(state, reason="the leader was still serving after the drain timeout"), now, force=False)
    if state.phase == "stopping":
        if state.forced:
            return _quit(state, 0 if state.terminating else 1, state.reason)
        return _stop(state, now, force=True)
    # joining: the only other phase with a deadline
    return _quit(state, 1, f"the group did not come together within the startup timeout: {state.reason}")


def _stop(state: State, now: float, *, force: bool) -> Step:
    wait = KILL_SECONDS if force else STOP_SECONDS
    stopping = replace(state, phase="stopping", forced=force, deadline=now + wait, next_check=None)
    return stopping, (StopEngine(force=force),)


def _quit(state: State, code: int, reason: str) -> Step:
    stopped = replace(state, phase="stopped", running=False, deadline=None, next_check=None, reason=reason)
    return stopped, (Quit(code, reason),)


def _terminate(state: State, now: float, timing: Timing) -> Step:
    if state.terminating:
        return state, ()
    going = replace(state, terminating=True)
    if state.phase == "stopping":
        return going, ()
    if not state.running:
        return _quit(going, 0, "the pod must go and no engine runs")
    asked = going if state.next_check is None else replace(going, next_check=now)
    waits = replace(asked, phase="draining", deadline=now + timing.drain_timeout, reason="the leader drains first")
    return waits, ()


def _ended(state: State, event: Ended, now: float, timing: Timing) -> Step:
    if state.terminating:
        return _quit(state, 0, state.reason)
    if state.phase == "stopping":
        return _join(state, now, timing, state.reason)
    return _join(replace(state, failed=True), now, timing, event.reason)


def _silent(state: State, event: Silent, now: float) -> Step:
    if state.phase == "stopping":
        return state, ()
    known = replace(state, next_check=now + ASK_INTERVAL)
    if not state.running:
        return (known if state.failed else replace(known, reason=event.reason)), ()
    if state.phase == "draining":
        gone = now - state.heard_at > LEAVING_SILENCE
        return _stop(replace(known, reason="the leader is gone"), now, force=False) if gone else (known, ())
    if now - state.heard_at <= SILENCE:
        return known, ()
    lost = f"the leader was not heard from for {SILENCE:g} s: {event.reason}"
    return _stop(replace(known, reason=lost), now, force=True)


def _heard(state: State, event: Heard, now: float) -> Step:
    if state.phase == "stopping":
        return state, ()
    known = replace(state, heard_at=now, next_check=now + ASK_INTERVAL)
    answer = event.answer
    if not state.running:
        return _joined(known, event, now)
    if state.phase == "draining":
        if answer.run == state.run and answer.phase in _SERVING:
            return known, ()
        return _stop(replace(known, reason="the leader has stopped"), now, force=False)
    if answer.run != state.run or answer.phase not in (*_SERVING, "stopping"):
        return _stop(replace(known, reason="the leader begins a new run"), now, force=True)
    return _with_leader(known, answer, now), ()


def _joined(state: State, event: Heard, now: float) -> Step:
    """Follow the leader into its run, or start the engine once the leader has begun it."""
    answer = event.answer
    if answer.run != state.run:
        return replace(state, run=answer.run, failed=False, reason="waiting for the other ranks", next_check=now), ()
    if state.failed or answer.phase not in _SERVING:
        return state, ()
    started = replace(
        state,
        phase="starting",
        running=True,
        epoch=state.epoch + 1,
        started_at=now,
        # The leader has a deadline of its own for its start, and ends the run when that is over.
        deadline=None,
        next_check=now,
        reason="the leader is not ready yet",
    )
    return started, (StartRank(event.leader),)


def _with_leader(state: State, answer: Answer, now: float) -> State:
    if not answer.ready:
        return replace(state, phase="starting", reason=f"the leader is not ready: {answer.phase}")
    took = state.start_seconds if state.phase == "ready" else now - state.started_at
    return replace(state, phase="ready", start_seconds=took, reason="")
