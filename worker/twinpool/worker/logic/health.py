"""Whether a ready engine still serves, judged by its progress: no I/O, no clock.

Rules that always hold:

* Load never makes an engine unready. A one-token probe waits behind real requests (27 s behind 48 of them, measured
  with vLLM 0.32 on a CPU), so a probe that is late says nothing while the engine's counters move.
* A rank whose requests run must move its counters within the stall timeout, each data-parallel rank for itself.
* An engine in which nothing runs is asked for one token every third of the stall timeout; the token's own step is
  then the progress. Requests that only wait, such as for KV from a lost prefill worker, are no work of this engine.
* What the HTTP server says of itself is believed only when it is bad: vLLM's ``/health`` stays 200 when a headless rank
  is dead, and while it drains.
* An engine that prints no counters (``--disable-log-stats``) is judged by ``/health`` alone, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from twinpool.worker.logic.causes import Cause, cause_of

if TYPE_CHECKING:
    from twinpool.worker.logic.events import ProbeEnded, Seen
    from twinpool.worker.logic.load import Work

#: Looks in a row at an engine that says it is dead, and probes in a row that end in an error, until it is believed.
DEAD_LOOKS = 2
FAILED_PROBES = 3


@dataclass(frozen=True)
class Mark:
    """What a rank's counters showed last, and since when they show it."""

    work: Work
    since: float


@dataclass(frozen=True)
class Watch:
    """What is known of a ready engine. Times are on the caller's clock, in seconds."""

    #: When the engine last proved that it works: a token, or a counter that moved.
    moved: float
    #: When its HTTP server last answered.
    answered: float
    #: When it was last looked at.
    looked: float
    marks: tuple[Mark, ...] = field(default=())
    #: Since when a probe is out.
    probe_since: float | None = None
    #: When the last probe ended.
    probed: float = float("-inf")
    dead_looks: int = 0
    failed_probes: int = 0
    failure: str = ""
    aborted: bool = False
    #: File systems without room, in words; empty when there are none.
    disk: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong although the engine serves."""
        found = [self.disk] if self.disk else []
        if not self.marks and self.answered > self.moved:
            found.append("the engine prints no counters (--disable-log-stats?): a stall would not be noticed")
        return tuple(found)


@dataclass(frozen=True)
class Verdict:
    """Why the engine is lost."""

    cause: Cause
    reason: str


def begin(now: float) -> Watch:
    """Return the watch over an engine that has just given a token."""
    return Watch(moved=now, answered=now, looked=now)


def look(watch: Watch, seen: Seen, now: float, stall: float) -> Watch:
    """Take in one look at the engine."""
    if now - watch.looked > stall / 2:
        # The launcher itself did not run (a frozen container): nothing was seen of the engine, which was frozen too.
        watch = replace(
            watch,
            answered=now,
            marks=tuple(replace(mark, since=now) for mark in watch.marks),
            probe_since=None if watch.probe_since is None else now,
        )
    spoke = seen.health is not None or bool(seen.work)
    watch = replace(
        watch,
        looked=now,
        disk=seen.disk,
        answered=now if spoke else watch.answered,
        dead_looks=watch.dead_looks + 1 if seen.health is False else 0,
    )
    return _compare(watch, seen.work, now) if seen.work else watch


def _compare(watch: Watch, work: tuple[Work, ...], now: float) -> Watch:
    """Note which ranks' counters moved since the look before."""
    known = {mark.work.engine: mark for mark in watch.marks}
    still = {
        each.engine: known[each.engine].since
        for each in work
        if each.engine in known and known[each.engine].work.marks == each.marks
    }
    marks = tuple(Mark(each, still.get(each.engine, now)) for each in work)
    if not any(each.engine in known and each.engine not in still for each in work):
        return replace(watch, marks=marks)
    # A failed probe is history once others are served; the probe that is out may itself have moved something.
    failed = watch.failed_probes if watch.probe_since is not None else 0
    return replace(watch, marks=marks, moved=now, failed_probes=failed)


def answered(watch: Watch, ended: ProbeEnded, now: float) -> Watch:
    """Take in how a probe ended. A late one that real work overtook proves nothing against the engine."""
    watch = replace(watch, probe_since=None, probed=now)
    if ended.ok:
        return replace(watch, moved=now, answered=now, failed_probes=0, failure="")
    return replace(
        watch,
        failed_probes=watch.failed_probes + (not ended.late),
        failure=ended.reason,
        aborted=ended.aborted,
    )


def wants_probe(watch: Watch, now: float, stall: float) -> bool:
    """Return whether to ask for a token: nothing runs, and nothing has been proved for a third of the stall timeout."""
    if watch.probe_since is not None or not watch.marks or any(mark.work.running for mark in watch.marks):
        return False
    return now - max(watch.moved, watch.probed) >= (stall / 18 if watch.failed_probes else stall / 3)


def judge(watch: Watch, now: float, stall: float) -> Verdict | None:
    """Return why the engine is lost, or None while it serves."""
    if watch.aborted:
        return Verdict("Aborting", f"the engine ends requests unasked, as one that was told to stop: {watch.failure}")
    if watch.dead_looks >= DEAD_LOOKS:
        return Verdict("EngineDead", "the engine's HTTP server says that its engine is dead (/health)")
    if now - watch.answered >= stall:
        return Verdict("Silent", f"the engine's HTTP server has not answered for {stall:g} s")
    for mark in watch.marks:
        if mark.work.running and now - mark.since >= stall:
            what = f"{mark.work.running:g} requests run and no counter has moved for {stall:g} s"
            return Verdict("Stuck", f"the engine is stuck: {what} (rank {mark.work.engine})")
    if watch.failed_probes >= FAILED_PROBES:
        cause = cause_of(watch.failure, disk_full=bool(watch.disk))
        text = f"{watch.failed_probes} requests for one token failed in a row, the last one: {watch.failure}"
        return Verdict("Failing" if cause == "Crashed" else cause, text)
    if watch.probe_since is not None and now - max(watch.moved, watch.probe_since) >= stall:
        return Verdict("Wedged", f"nothing runs in the engine, and one token did not come within {stall:g} s")
    return None
