"""What a preflight measures and concludes: which pairs, in which order, what a time is worth, which link is to blame.

The ranks of a group are only as fast as their slowest link, and an engine does not say which one that is. Always true:
every pair is measured once; a conclusion names pods, never only numbers; nothing here waits or measures.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Only ``failed``, what the roll call knows for sure, keeps the engine from starting: a measurement that breaks off
#: (``unfinished``) says that something is wrong, not that the engine cannot work.
Outcome = Literal["passed", "failed", "unfinished", "skipped"]
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "unfinished", "skipped")
Kind = Literal["all-reduce", "all-to-all"]

#: Message sizes of the collectives, in bytes: a token's activations, a batch's, a long prompt's.
SIZES = (64 * 1024, 1024 * 1024, 16 * 1024 * 1024)
#: Message of a link's bandwidth, in bytes. NVLink carries 4 MiB in less time than it takes to start sending them.
LINK_BYTES = {"gloo": 4 * 1024 * 1024, "nccl": 64 * 1024 * 1024}
#: Share of the median link below which a link is named as slow: noise of a shared machine stays above it.
SLOW_SHARE = 0.5


@dataclass(frozen=True)
class Member:
    """A rank that has come, and how many ranks it expects."""

    rank: int
    world: int
    pod: str

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        """Read what was written with :func:`dataclasses.asdict` and :func:`json.dumps`."""
        value = json.loads(text)
        return cls(int(value["rank"]), int(value["world"]), str(value["pod"]))


@dataclass(frozen=True)
class Collective:
    """One collective at one size. ``bandwidth`` is the bus bandwidth in bytes per second."""

    kind: Kind
    bytes: int
    seconds: float
    bandwidth: float


@dataclass(frozen=True)
class Link:
    """One pair of ranks, by their pods. Seconds one way for an empty message, bytes per second for a large one."""

    first: str
    second: str
    latency: float
    bandwidth: float

    @property
    def name(self) -> str:
        """The pair in words."""
        return f"{self.first} - {self.second}"


@dataclass(frozen=True)
class Result:
    """What one preflight found."""

    outcome: Outcome
    problem: str = ""
    backend: str = ""
    world: int = 0
    #: Seconds from the moment that all ranks had come.
    seconds: float = 0.0
    collectives: tuple[Collective, ...] = ()
    links: tuple[Link, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """Return the body of ``/preflight``."""
        slowest = min(self.links, key=lambda link: link.bandwidth, default=None)
        return json.dumps({**asdict(self), "slowest": slowest.name if slowest else ""})

    @classmethod
    def from_json(cls, text: str | bytes) -> Result | None:
        """Read what :meth:`to_json` wrote; None for anything else, such as a file that is not whole yet."""
        try:
            value: Mapping[str, Any] = json.loads(text)
            return cls(
                outcome=OUTCOMES[OUTCOMES.index(value["outcome"])],
                problem=str(value["problem"]),
                backend=str(value["backend"]),
                world=int(value["world"]),
                seconds=float(value["seconds"]),
                collectives=tuple(Collective(**entry) for entry in value["collectives"]),
                links=tuple(Link(**entry) for entry in value["links"]),
                warnings=tuple(map(str, value["warnings"])),
            )
        except (ValueError, TypeError, KeyError):
            return None


def roll_call(members: Sequence[Member], world: int) -> tuple[str, tuple[int, ...]]:
    """Return what is wrong with those who came, in words, and the ranks that are still missing."""
    pods: dict[int, str] = {}
    for member in members:
        if member.world != world:
            who = f"rank {member.rank}, pod {member.pod}, expects {member.world} ranks and others expect {world}"
            return f"wrong world size: {who}; the pods of the group run from different revisions of the pool", ()
        if pods.setdefault(member.rank, member.pod) != member.pod:
            return f"two pods are rank {member.rank}: {pods[member.rank]} and {member.pod}", ()
    return "", tuple(rank for rank in range(world) if rank not in pods)


def missing_peer(missing: Sequence[int], members: Sequence[Member], seconds: float) -> str:
    """Say who did not come."""
    ranks = ", ".join(map(str, missing))
    came = ", ".join(sorted({member.pod for member in members})) or "nobody"
    return f"missing peer: rank {ranks} did not come within {seconds:g} s (came: {came}); look at that pod's log"


def blocked_port(rank: int, address: str, port: int, seconds: float, error: str) -> str:
    """Say which port cannot be reached."""
    return (
        f"blocked port: rank {rank} cannot reach port {port} of rank 0 at {address} within {seconds:g} s ({error}); "
        "let the pods of a group reach each other on all ports (NetworkPolicy, firewall)"
    )


def rounds(world: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return every pair of ranks, in rounds with each rank in at most one pair (circle method of tournaments)."""
    seats: list[int | None] = [*range(world), *([None] if world % 2 else [])]
    plan = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        plan.append(tuple(sorted((min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None)))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(plan)


def bus_bandwidth(kind: Kind, world: int, size: int, seconds: float) -> float:
    """Return the bytes per second that each link must have carried (nccl-tests, doc/PERFORMANCE.md)."""
    share = (world - 1) / world
    return (2 * share if kind == "all-reduce" else share) * size / seconds


def slow_links(links: Sequence[Link]) -> tuple[str, ...]:
    """Name the links far below the others; with fewer than three there is nothing to compare with."""
    if len(links) < 3:
        return ()
    median = statistics.median(link.bandwidth for link in links)
    return tuple(
        f"the link {link.name} carries {link.bandwidth / 1e6:.0f} MB/s, the median link {median / 1e6:.0f} MB/s"
        for link in sorted(links, key=lambda link: link.bandwidth)
        if link.bandwidth < SLOW_SHARE * median
    )
