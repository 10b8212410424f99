"""What a leader knows of the other ranks of its group, and what they say to each other.

A group that spans nodes lives in *runs*: one start of the engine on all ranks together. A run is named by the leader
(``<launcher>/<epoch>``, so that a restarted launcher never repeats a name). Ranks ask the leader about once a second,
and each question carries what the rank itself is doing; no rank dials another one.

Always true: a run begins only when every rank has said that it holds no engine of an earlier one, and ends on all
ranks as soon as one of them has lost its engine or is not heard from. Engines that are left alone by a dead rank answer
their health check and serve nobody.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

RankState = Literal["waiting", "running", "failed", "leaving"]
_STATES: tuple[RankState, ...] = ("waiting", "running", "failed", "leaving")

#: Seconds between two questions of a rank, and the silence after which either side takes the other one for lost.
ASK_INTERVAL = 0.5
SILENCE = 10.0
#: Longest reason that a rank's report carries.
LONGEST_REASON = 2000


@dataclass(frozen=True)
class Report:
    """What one rank says about itself. ``uid`` is the leader's, as the rank knows it."""

    uid: str
    rank: int
    pod: str
    #: The run that the rank waits for or runs; empty when it knows none yet.
    run: str
    state: RankState
    reason: str = ""

    def to_json(self) -> str:
        """Return the body of the question."""
        return json.dumps({**vars(self), "reason": self.reason[:LONGEST_REASON]})

    @classmethod
    def from_json(cls, text: str | bytes) -> Report | None:
        """Read what :meth:`to_json` wrote, None for anything else."""
        try:
            value = json.loads(text)
            words = {name: str(value[name])[:LONGEST_REASON] for name in ("uid", "pod", "run", "reason")}
            rank, state = int(value["rank"]), value["state"]
        except (ValueError, TypeError, KeyError):
            return None
        if rank < 1 or state not in _STATES:
            return None
        return cls(rank=rank, state=state, **words)


@dataclass(frozen=True)
class Answer:
    """What the leader says about itself."""

    run: str
    phase: str
    ready: bool

    def to_json(self) -> str:
        """Return the body of the answer."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Answer | None:
        """Read what :meth:`to_json` wrote, None for anything else."""
        try:
            value: Any = json.loads(text)
            return cls(str(value["run"]), str(value["phase"]), bool(value["ready"]))
        except (ValueError, TypeError, KeyError):
            return None


@dataclass(frozen=True)
class Ranks:
    """The last report of each rank, and when it came."""

    last: tuple[tuple[Report, float], ...] = ()

    def heard(self, report: Report, now: float) -> Ranks:
        """Return the ranks after ``report``. A rank that ran and now waits in the same run has lost its engine."""
        before = self.of(report.rank)
        if (
            report.state == "waiting"
            and before is not None
            and (before.run, before.state) in ((report.run, "running"), (report.run, "failed"))
        ):
            report = replace(report, state="failed", reason=before.reason or "it started anew")
        others = tuple(entry for entry in self.last if entry[0].rank != report.rank)
        return Ranks((*others, (report, now)))

    def of(self, rank: int) -> Report | None:
        """Return the last report of a rank."""
        return next((report for report, _ in self.last if report.rank == rank), None)

    def absent(self, run: str, nodes: int, now: float) -> str:
        """Return which rank does not wait for ``run`` yet, in words; empty when every one does."""
        times = {report.rank: (report, heard) for report, heard in self.last}
        for rank in range(1, nodes):
            if rank not in times:
                return f"rank {rank} of {nodes} was not heard from yet"
            report, heard = times[rank]
            if now - heard > SILENCE:
                return f"rank {rank} of {nodes}, pod {report.pod}, was last heard from {now - heard:.0f} s ago"
            if report.state == "failed":
                return f"rank {rank} of {nodes}, pod {report.pod}: {report.reason}"
            if (report.run, report.state) != (run, "waiting"):
                return f"rank {rank} of {nodes}, pod {report.pod}, is still {report.state}"
        return ""

    def trouble(self, run: str, nodes: int, now: float) -> str:
        """Return what ends ``run``, in words; empty while every rank takes part in it."""
        for report, heard in sorted(self.last, key=lambda entry: entry[0].rank):
            who = f"rank {report.rank} of {nodes}, pod {report.pod},"
            if report.rank >= nodes:
                continue
            if now - heard > SILENCE:
                return f"{who} was not heard from for {SILENCE:g} s"
            if report.state == "failed":
                return f"{who} lost its engine: {report.reason}"
            if report.run != run:
                return f"{who} started anew"
        return ""

    def leaving(self, nodes: int) -> str:
        """Return which rank's pod must go, in words; empty when none must."""
        for report, _ in self.last:
            if report.rank < nodes and report.state == "leaving":
                return f"rank {report.rank} of {nodes}, pod {report.pod}, must go"
        return ""
