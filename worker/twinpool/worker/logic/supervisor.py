"""The life of one engine as a state machine: events in, actions out, time as an argument.

Rules that always hold:

* A worker is ready only in phase ``ready``, which it enters when the engine gave a probe token *after this start*.
  Load never makes it unready. It leaves ``ready`` only when its process ends, when it is lost by its lack of progress
  (:mod:`twinpool.worker.logic.health`), or when the pod must go.
* An engine that ends before it was ever ready ends the launcher with its reason: the kubelet's back-off holds the pod.
  One that is lost later is restarted in place: its weights are in the page cache, its pod and address stay. Five
  restarts within ten minutes are too many, one is with a lasting cause (:mod:`.causes`); then the container ends too.
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
from twinpool.worker.logic import health
from twinpool.worker.logic.causes import LASTING, Cause, cause_of
from twinpool.worker.logic.events import Begin as Begin
from twinpool.worker.logic.events import CheckHealth as CheckHealth
from twinpool.worker.logic.events import Exited as Exited
from twinpool.worker.logic.events import HealthSeen as HealthSeen
from twinpool.worker.logic.events import LoadSeen as LoadSeen
from twinpool.worker.logic.events import Look as Look
from twinpool.worker.logic.events import ProbeEnded as ProbeEnded
from twinpool.worker.logic.events import Quit as Quit
from twinpool.worker.logic.events import RankHeard as RankHeard
from twinpool.worker.logic.events import ReadLoad as ReadLoad
from twinpool.worker.logic.events import Seen as Seen
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
#: Time between two looks at a ready engine, as a share of the stall timeout: 5 s of 90 s.
LOOK_SHARE = 1 / 18


# Union, not |: these aliases are evaluated at run time.
Event = Union[Begin, Tick, Terminate, HealthSeen, ProbeEnded, LoadSeen, Seen, Exited, RankHeard]  # noqa: UP007
Action = Union[StartEngine, CheckHealth, SendProbe, Look, ReadLoad, StopEngine, Quit]  # noqa: UP007


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
    #: Why the engine was lost; empty from the next probe token on.
    cause: Cause | None = None
    #: How often it was lost for each cause.
    losses: tuple[tuple[Cause, int], ...] = ()
    #: What is known of a ready engine.
    watch: health.Watch | None = None
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
    def warnings(self) -> tuple[str, ...]:
        """Return what is wrong although the engine serves."""
        return self.watch.warnings if self.watch and self.ready else ()

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
        return _probed(state, event, now, timing)
    if isinstance(event, Seen):
        return _seen(state, event, now, timing)
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
        return _kill(replace(looked, reason=trouble, cause="RankLost"), now)
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
    if state.phase == "ready":
        return waiting, (Look(state.epoch),)
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
    return _kill(replace(state, reason=reason, cause="StartTimeout"), now)


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


def _probed(state: State, event: ProbeEnded, now: float, timing: Timing) -> Step:
    if state.phase == "ready" and state.watch is not None:
        return _judged(replace(state, watch=health.answered(state.watch, event, now)), now, timing)
    if state.phase != "probing":
        return state, ()
    if not event.ok:
        return replace(state, next_check=now + PROBE_INTERVAL, reason=f"no probe token: {event.reason}"), ()
    ready = replace(
        state,
        phase="ready",
        ever_ready=True,
        deadline=None,
        next_check=now + timing.stall_timeout * LOOK_SHARE,
        start_seconds=now - state.started_at,
        reason="",
        cause=None,
        watch=health.begin(now),
    )
    return ready, ()


def _seen(state: State, event: Seen, now: float, timing: Timing) -> Step:
    if state.phase != "ready" or state.watch is None:
        return state, ()
    watch = health.look(state.watch, event, now, timing.stall_timeout)
    looked = replace(state, watch=watch, next_check=now + timing.stall_timeout * LOOK_SHARE)
    after, actions = _judged(looked, now, timing)
    if actions or not health.wants_probe(watch, now, timing.stall_timeout):
        return after, actions
    # Twice the time: whether the engine is wedged is judged before the probe gives up.
    return replace(after, watch=replace(watch, probe_since=now)), (SendProbe(state.epoch, 2 * timing.stall_timeout),)


def _judged(state: State, now: float, timing: Timing) -> Step:
    """End an engine that no longer serves; one that was told to stop by somebody else has the time to do so."""
    assert state.watch is not None, "a ready engine is watched"
    verdict = health.judge(state.watch, now, timing.stall_timeout)
    if verdict is None:
        return state, ()
    lost = replace(state, reason=verdict.reason, cause=verdict.cause)
    return _stop(lost, now) if verdict.cause == "Aborting" else _kill(lost, now)


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
    if state.phase == "stopping" and state.terminating:
        return _quit(state, 0, state.reason)
    # A stop that the launcher itself decided on has the better reason than "killed by SIGKILL".
    decided = not state.terminating and (state.forced or state.cause is not None)
    reason = state.reason if decided else event.reason
    state = _blame(state, reason)
    if state.terminating or not state.ever_ready:
        return _quit(state, 1, reason)
    if state.cause in LASTING:
        return _quit(state, 1, f"{reason} - a new process in this container would not help")
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


def _blame(state: State, reason: str) -> State:
    """Name and count the cause of a loss; an engine that was asked to stop is none."""
    if state.phase == "stopping" and state.cause is None:
        return state
    cause = state.cause or cause_of(reason, disk_full=state.watch is not None and bool(state.watch.disk))
    counts = dict(state.losses)
    losses = tuple(sorted({**counts, cause: counts.get(cause, 0) + 1}.items()))
    return replace(state, cause=cause, losses=losses)
