"""What happens to an engine's life and what it asks for; :mod:`twinpool.worker.logic.supervisor` says when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinpool.worker.logic.load import Work
    from twinpool.worker.logic.ranks import Report


@dataclass(frozen=True)
class Timing:
    """Seconds the pool allows."""

    startup_timeout: float
    drain_timeout: float
    #: Pods of the group.
    nodes: int = 1
    #: Time within which a ready engine must move its counters while requests run (:mod:`twinpool.worker.logic.health`).
    stall_timeout: float = 90.0


@dataclass(frozen=True)
class Begin:
    """The launcher is set up."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Terminate:
    """The pod must go (SIGTERM)."""


@dataclass(frozen=True)
class HealthSeen:
    """What ``/health`` of the engine said."""

    epoch: int
    healthy: bool


@dataclass(frozen=True)
class ProbeEnded:
    """Whether a token came; ``reason`` says why not.

    ``late`` when nothing was heard within the time, ``aborted`` when the answer ended with ``finish_reason: abort``.
    """

    epoch: int
    ok: bool
    reason: str = ""
    late: bool = False
    aborted: bool = False


@dataclass(frozen=True)
class Seen:
    """One look at a ready engine.

    ``health`` is what ``/health`` says, None when nobody answered; ``work`` is empty when no counters were seen;
    ``disk`` names file systems without room.
    """

    epoch: int
    health: bool | None
    work: tuple[Work, ...] = ()
    disk: str = ""


@dataclass(frozen=True)
class LoadSeen:
    """Whether requests run or wait (None when the engine did not say), and whether KV blocks wait to be pulled."""

    epoch: int
    busy: bool | None
    kv_held: bool = False


@dataclass(frozen=True)
class Exited:
    """The engine's first process ended and its group is gone."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class RankHeard:
    """Another rank of the group said how it is."""

    report: Report


@dataclass(frozen=True)
class StartEngine:
    """Start the engine for this epoch."""

    epoch: int


@dataclass(frozen=True)
class CheckHealth:
    """Ask the engine's ``/health``; answer with :class:`HealthSeen`."""

    epoch: int


@dataclass(frozen=True)
class SendProbe:
    """Ask the engine for one token within ``timeout`` seconds; answer with :class:`ProbeEnded`."""

    epoch: int
    timeout: float


@dataclass(frozen=True)
class Look:
    """Look at a ready engine and its disks; answer with :class:`Seen`."""

    epoch: int


@dataclass(frozen=True)
class ReadLoad:
    """Read the engine's counters; answer with :class:`LoadSeen`."""

    epoch: int


@dataclass(frozen=True)
class StopEngine:
    """Signal the engine: SIGTERM to its first process, or SIGKILL to its whole group."""

    force: bool


@dataclass(frozen=True)
class Quit:
    """End the launcher; a code other than 0 comes with the reason for the termination message."""

    code: int
    reason: str
