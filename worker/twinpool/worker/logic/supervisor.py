"""The life of one engine as a state machine: events in, actions out, time as an argument.

Rules that always hold:

* A worker is ready only in phase ``ready``, which it enters when the engine gave a probe token *after this start*.
  Load never makes it unready: a ready engine is not probed again, because a one-token probe waits tens of seconds
  behind real requests. It leaves ``ready`` only when its process ends or the pod must go.
* An engine that ends before it was ever ready ends the launcher with its reason, so that the kubelet's back-off holds
  back a pod that cannot start. One that ends later is restarted in place: its weights are in the page cache, its pod
  and address stay. Five restarts within ten minutes are too many; then the pod ends too.
* Draining waits until the engine is idle and nobody will pull KV blocks from it any more, then asks it to stop. vLLM
  cuts running streams on SIGTERM and answers new requests with HTTP 200 and ``finish_reason: abort``, so a busy engine
  is signalled only when time is out.
* In a group that spans nodes this is the leader's life: a start waits in ``joining`` until every other rank waits for
  it, and ends on all ranks together (:mod:`twinpool.worker.logic.ranks`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Union

from twinpool.core.protocol import KV_LEASE_SECONDS
from twinpool.worker.logic.events import Begin as Begin
from twinpool.worker.logic.events import CheckHealth as CheckHealth
from twinpool.worker.logic.events import Exited as Exited
from twinpool.worker.logic.events import HealthSeen as HealthSeen
from twinpool.worker.logic.events import LoadSeen as LoadSeen
from twinpool.worker.logic.events import ProbeEnded as ProbeEnded
from twinpool.worker.logic.events import Quit as Quit
from twinpool.worker.logic.events import RankHeard as RankHeard
from twinpool.worker.logic.events import ReadLoad as ReadLoad
from twinpool.worker.logic.events import SendProbe as SendProbe
from twinpool.worker.logic.events import StartEngine as StartEngine
from twinpool.worker.logic.events import StopEngine as StopEngine
from twinpool.worker.logic.events import Terminate as Terminate
from twinpool.worker.logic.events import Tick as Tick
from twinpool.worker.logic.events import Timing as Timing
from twinpool.worker.logic.ranks import Ranks

Phase = Literal["new", "joining", "starting", "probing", "ready", "backoff", "draining", "stopping", "stopped"]
PHASES: tuple[Phase, ...] = (
    "new",
    "joining",
    "starting",
    "probing",
    "ready",
    "backoff",
    "draining",
    "stopping",
    "stopped",
)

#: Seconds between two looks at an engine that is starting or draining.
CHECK_INTERVAL = 0.5
#: Seconds after a probe that failed until the next one.
PROBE_INTERVAL = 1.0
#: Seconds for which an engine must be idle before a drain ends: routers need a moment to notice that the pod goes.
IDLE_SECONDS = 2.0
#: Seconds that an engine has after SIGTERM, before SIGKILL. With :data:`KILL_SECONDS` it stays below the 15 s by which
#: a pod's grace period is longer than its drain timeout.
STOP_SECONDS = 10.0
#: Seconds after SIGKILL until the launcher leaves without it (a process stuck in the kernel).
KILL_SECONDS = 4.0
#: Restarts allowed within the window, both after the engine was ready once.
RESTART_BUDGET = 5
RESTART_WINDOW = 600.0
MAX_BACKOFF = 30.0


# Union, not |: these aliases are evaluated at run time.
Event = Union[Begin, Tick, Terminate, HealthSeen, ProbeEnded, LoadSeen, Exited, RankHeard]  # noqa: UP007
Action = Union[StartEngine, CheckHealth, SendProbe, ReadLoad, StopEngine, Quit]  # noqa: UP007


@dataclass(frozen=True)
class State:
    """Where the engine's life stands. Times are on the caller's clock, in seconds."""

    phase: Phase = "new"
    #: Number of the current start, from 1; answers about an earlier start are ignored.
    epoch: int = 0
    ever_ready: bool = False
    terminating: bool = False
    #: True from SIGKILL on.
    forced: bool = False
    #: When the phase ends by itself.
    deadline: float | None = None
    #: When to look at the engine next; None while an answer is outstanding or nothing is to be looked at.
    next_check: float | None = None
    #: Since when no request ran or waited, while draining.
    idle_since: float | None = None
    started_at: float = 0.0
    #: Seconds the last successful start took.
    start_seconds: float | None = None
    #: Times of restarts within the window.
    restarts: tuple[float, ...] = ()
    total_restarts: int = 0
    reason: str = "the engine was not started yet"
    #: Random name of this launcher's life, and what the other ranks said last.
    instance: str = ""
    ranks: Ranks = field(default_factory=Ranks)
    #: When to look whether every rank still takes part; None when there is none, or no run.
    next_rank_check: float | None = None

    @property
    def ready(self) -> bool:
        """Whether requests may come."""
        return self.phase == "ready"

    @property
    def recent_restarts(self) -> int:
        """Return the restarts that count against the budget, as of the last one."""
        return len(self.restarts)

    @property
    def backoff(self) -> float:
        """Return the seconds to wait before the start that follows the last restart, 0 when there was none."""
        return min(MAX_BACKOFF, 2.0 ** (len(self.restarts) - 1)) if self.restarts else 0.0

    @property
    def run(self) -> str:
        """Return the name of the current start, which no other start of any launcher has."""
        return f"{self.instance}/{self.epoch}"


Step = tuple[State, tuple[Action, ...]]


def next_wakeup(state: State) -> float | None:
    """Return the time at which :class:`Tick` is due, or None when only other events can change anything."""
    times = [time for time in (state.deadline, state.next_check, state.next_rank_check) if time is not None]
    return min(times, default=None)


def step(state: State, event: Event, now: float, timing: Timing) -> Step:
    """Return the state after ``event`` and what to do; total: an event that does not fit changes nothing."""
    if isinstance(event, Begin):
        return _start(state, now, timing) if state.phase == "new" else (state, ())
    if isinstance(event, Tick):
        return _tick(state, now, timing)
    if isinstance(event, Terminate):
        return _terminate(state, now, timing)
    if isinstance(event, RankHeard):
        return _together(replace(state, ranks=state.ranks.heard(event.report, now)), now, timing)
    if event.epoch != state.epoch:
        return state, ()
    if isinstance(event, Exited):
        return _exited(state, event, now)
    if isinstance(event, HealthSeen):
        return _health(state, event, now)
    if isinstance(event, ProbeEnded):
        return _probed(state, event, now)
    return _load(state, event, now)


def _start(state: State, now: float, timing: Timing) -> Step:
    epoch = state.epoch + 1
    started = replace(
        state,
        phase="starting" if timing.nodes == 1 else "joining",
        epoch=epoch,
        deadline=now + timing.startup_timeout,
        next_check=now + CHECK_INTERVAL,
        started_at=now,
        reason="the engine is starting" if epoch == 1 else f"the engine is starting again after: {state.reason}",
    )
    return (started, (StartEngine(epoch),)) if timing.nodes == 1 else _together(started, now, timing)


def _together(state: State, now: float, timing: Timing) -> Step:
    """Begin a run when every rank waits for it, and end it when one of them is lost."""
    if state.phase == "joining":
        absent = state.ranks.absent(state.run, timing.nodes, now)
        if absent:
            return replace(state, reason=f"waiting for {absent}", next_check=now + CHECK_INTERVAL), ()
        begun = replace(state, phase="starting", next_check=now + CHECK_INTERVAL, next_rank_check=now + CHECK_INTERVAL)
        return replace(begun, reason="the engine is starting"), (StartEngine(state.epoch),)
    if state.phase not in ("starting", "probing", "ready", "draining"):
        return replace(state, next_rank_check=None), ()
    looked = replace(state, next_rank_check=now + CHECK_INTERVAL)
    trouble = state.ranks.trouble(state.run, timing.nodes, now)
    if trouble:
        return _kill(replace(looked, reason=trouble), now)
    leaving = state.ranks.leaving(timing.nodes)
    if leaving and state.phase == "ready":
        return _drain(replace(looked, reason=f"draining: {leaving}"), now, timing)
    if leaving and state.phase != "draining":
        return _kill(replace(looked, reason=leaving), now)
    return looked, ()


def _tick(state: State, now: float, timing: Timing) -> Step:
    if state.deadline is not None and now >= state.deadline:
        return _deadline(state, now, timing)
    if state.next_rank_check is not None and now >= state.next_rank_check:
        return _together(state, now, timing)
    if state.next_check is None or now < state.next_check:
        return state, ()
    if state.phase == "joining":
        return _together(state, now, timing)
    waiting = replace(state, next_check=None)
    if state.phase == "starting":
        return waiting, (CheckHealth(state.epoch),)
    if state.phase == "probing":
        return waiting, (_probe(state, now),)
    return waiting, (ReadLoad(state.epoch),)  # draining


def _probe(state: State, now: float) -> SendProbe:
    """Build the probe; it may take all the time that is left to start, for a first token can compile kernels."""
    assert state.deadline is not None, "starting and probing have a deadline"
    return SendProbe(state.epoch, max(state.deadline - now, PROBE_INTERVAL))


def _deadline(state: State, now: float, timing: Timing) -> Step:
    if state.phase == "backoff":
        return _start(state, now, timing)
    if state.phase == "joining":
        text = f"the group did not come together within the startup timeout of {timing.startup_timeout:g} s"
        return _quit(state, 1, f"{text}: {state.reason}")
    if state.phase == "draining":
        reason = f"requests were still running after the drain timeout of {timing.drain_timeout:g} s"
        return _stop(replace(state, reason=reason), now)
    if state.phase == "stopping":
        if state.forced:
            return _quit(state, 0 if state.terminating else 1, state.reason)
        return _kill(state, now)
    # starting or probing: the only other phases with a deadline
    reason = f"the engine was not ready within the startup timeout of {timing.startup_timeout:g} s: {state.reason}"
    return _kill(replace(state, reason=reason), now)


def _stop(state: State, now: float) -> Step:
    stopping = replace(
        state,
        phase="stopping",
        deadline=now + STOP_SECONDS,
        next_check=None,
        next_rank_check=None,
        idle_since=None,
    )
    return stopping, (StopEngine(force=False),)


def _kill(state: State, now: float) -> Step:
    killed = replace(
        state, phase="stopping", forced=True, deadline=now + KILL_SECONDS, next_check=None, next_rank_check=None
    )
    return killed, (StopEngine(force=True),)


def _quit(state: State, code: int, reason: str) -> Step:
    stopped = replace(state, phase="stopped", deadline=None, next_check=None, next_rank_check=None, reason=reason)
    return stopped, (Quit(code, reason),)


def _terminate(state: State, now: float, timing: Timing) -> Step:
    if state.terminating or state.phase == "stopped":
        return state, ()  # the kubelet repeats SIGTERM after its own restart; the drain goes on
    going = replace(state, terminating=True)
    if state.phase in ("new", "joining", "backoff"):
        return _quit(going, 0, "the pod must go and no engine runs")
    if state.phase == "ready":
        return _drain(replace(going, reason="draining"), now, timing)
    if state.phase == "stopping":
        return going, ()
    if state.phase == "draining":
        return replace(going, deadline=now + timing.drain_timeout), ()
    return _stop(replace(going, reason="the pod must go; the engine never served a request after this start"), now)


def _drain(state: State, now: float, timing: Timing) -> Step:
    return replace(state, phase="draining", deadline=now + timing.drain_timeout, next_check=now), ()


def _health(state: State, event: HealthSeen, now: float) -> Step:
    if state.phase != "starting":
        return state, ()
    if not event.healthy:
        return replace(state, next_check=now + CHECK_INTERVAL), ()
    probing = replace(state, phase="probing", next_check=None, reason="the engine answers; waiting for a probe token")
    return probing, (_probe(state, now),)


def _probed(state: State, event: ProbeEnded, now: float) -> Step:
    if state.phase != "probing":
        return state, ()
    if not event.ok:
        return replace(state, next_check=now + PROBE_INTERVAL, reason=f"no probe token: {event.reason}"), ()
    ready = replace(
        state,
        phase="ready",
        ever_ready=True,
        deadline=None,
        next_check=None,
        start_seconds=now - state.started_at,
        reason="",
    )
    return ready, ()


def _load(state: State, event: LoadSeen, now: float) -> Step:
    if state.phase != "draining":
        return state, ()
    if event.busy is not False:
        return replace(state, next_check=now + CHECK_INTERVAL, idle_since=None), ()
    since = now if state.idle_since is None else state.idle_since
    # A block that nobody pulled within its lease is lost to decode anyway, whatever the engine reports.
    quiet = KV_LEASE_SECONDS if event.kv_held else IDLE_SECONDS
    if now - since >= quiet:
        return _stop(replace(state, reason="drained: the engine is idle"), now)
    return replace(state, next_check=now + CHECK_INTERVAL, idle_since=since), ()


def _exited(state: State, event: Exited, now: float) -> Step:
    if state.phase in ("new", "joining", "backoff", "stopped"):
        return state, ()
    # A forced stop that the launcher itself decided on has the better reason than "killed by SIGKILL".
    reason = state.reason if state.forced and not state.terminating else event.reason
    if state.phase == "stopping" and state.terminating:
        return _quit(state, 0, state.reason)
    if state.terminating or not state.ever_ready:
        return _quit(state, 1, reason)
    recent = tuple(time for time in state.restarts if now - time < RESTART_WINDOW)
    if len(recent) >= RESTART_BUDGET:
        minutes = f"{RESTART_WINDOW / 60:g} minutes"
        return _quit(state, 1, f"the engine ended {len(recent) + 1} times within {minutes}, the last time: {reason}")
    counted = replace(state, restarts=(*recent, now), total_restarts=state.total_restarts + 1, reason=reason)
    waiting = replace(
        counted,
        phase="backoff",
        forced=False,
        deadline=now + counted.backoff,
        next_check=None,
        next_rank_check=None,
    )
    return waiting, ()
