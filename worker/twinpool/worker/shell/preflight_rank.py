"""One rank of a preflight: a process that imports torch, measures, writes down what it found, and ends.

The only module that imports torch, inside functions, because the launcher must never hold it (or a GPU's memory).
"""

from __future__ import annotations

import functools
import json
import os
import socket
import statistics
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from twinpool.core.errors import TwinpoolError
from twinpool.worker.logic import preflight
from twinpool.worker.logic.preflight import Collective, Link, Member, Result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Times that each message is sent; the median counts.
_REPEATS = 3
_POLL = 0.05


class PreflightFailed(TwinpoolError):
    """The ranks cannot work together."""


@dataclass(frozen=True)
class Seat:
    """Where a rank stands, and its limits in seconds: until all have come, and for the measurement after that."""

    rank: int
    world: int
    #: Number of the rank among those of its pod, which is its GPU.
    local: int
    pod: str
    leader: str
    port: int
    meet: float
    budget: float


def run(seat: Seat, result: Path) -> None:
    """Measure as ``seat`` and write the result to ``result``; this process ends here, without torch's own farewell."""
    try:
        found = _measure(seat)
    except ImportError as error:
        found = Result("skipped", f"the engine's Python has no torch.distributed: {error}")
    except PreflightFailed as error:
        found = Result("failed", error.problem)
    except RuntimeError as error:  # torch's own, which names addresses
        found = Result("unfinished", f"rank {seat.rank}, pod {seat.pod}: {str(error).splitlines()[0][:500]}")
    temporary = result.with_suffix(".part")
    temporary.write_text(found.to_json(), encoding="utf-8")
    temporary.replace(result)
    os._exit(0)


def _measure(seat: Seat) -> Result:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise ImportError("this build of torch has none")
    # Gloo sums on the CPU: many threads of many ranks would measure the processor, not the links.
    torch.set_num_threads(1)
    store = _meet(seat, dist)
    names = _roll_call(seat, store)
    backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(seat.local)
    began = time.monotonic()
    limit = timedelta(seconds=seat.budget)
    dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.world, timeout=limit)
    ranks = Ranks(dist, torch, "cuda" if backend == "nccl" else "cpu", seat)
    ranks.collective("all-reduce", 1024)  # connects everybody
    collectives = []
    for size in preflight.SIZES:
        if ranks.slowest(time.monotonic() - began) > seat.budget / 4:
            break
        collectives += [ranks.collective("all-reduce", size), ranks.collective("all-to-all", size)]
    links = [link for pairs in preflight.rounds(seat.world) if (link := ranks.links(pairs, names)) is not None]
    own = Result("passed", "", backend, seat.world, time.monotonic() - began, tuple(collectives), tuple(links))
    return _gather(seat, store, own)


def _meet(seat: Seat, dist: Any) -> Any:
    """Return the store that rank 0 holds."""
    limit = timedelta(seconds=seat.meet)
    if seat.rank:
        _reach(seat)
    try:
        return dist.TCPStore(seat.leader, seat.port, None, seat.rank == 0, limit, wait_for_workers=False)
    except RuntimeError as error:
        problem = f"blocked port: rank 0 cannot listen on {seat.leader} port {seat.port}: {str(error).splitlines()[0]}"
        raise PreflightFailed(problem, "free the port") from None


def _reach(seat: Seat) -> None:
    """Wait until rank 0 takes connections: torch's own client retries for minutes and does not say why."""
    deadline = time.monotonic() + seat.meet
    while True:
        try:
            socket.create_connection((seat.leader, seat.port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                why = error.strerror or str(error)
                problem = preflight.blocked_port(seat.rank, seat.leader, seat.port, seat.meet, why)
                raise PreflightFailed(problem, "let pods of a group reach each other") from None
        time.sleep(_POLL)


def _roll_call(seat: Seat, store: Any) -> dict[int, str]:
    """Register, wait for the others, and return everybody's pod."""
    store.set(f"member/{store.add('members', 1)}", json.dumps(asdict(Member(seat.rank, seat.world, seat.pod))))
    deadline = time.monotonic() + seat.meet
    while True:
        count = store.add("members", 0)
        members = [Member.from_json(store.get(f"member/{number}")) for number in range(1, count + 1)]
        problem, missing = preflight.roll_call(members, seat.world)
        if not problem and not missing:
            return {member.rank: member.pod for member in members}
        if not problem and time.monotonic() >= deadline:
            problem = preflight.missing_peer(missing, members, seat.meet)
        if problem:
            if seat.rank == 0:
                time.sleep(1.0)  # the others read the same before the store goes
            raise PreflightFailed(problem, "look at the pods of the group")
        time.sleep(_POLL)


def _gather(seat: Seat, store: Any, own: Result) -> Result:
    """Bring all ranks' links to rank 0, whose result is the group's."""
    store.set(f"links/{seat.rank}", json.dumps([asdict(link) for link in own.links]))
    if seat.rank:
        return own
    links = [Link(**entry) for rank in range(seat.world) for entry in json.loads(store.get(f"links/{rank}"))]
    return replace(own, links=tuple(links), warnings=preflight.slow_links(links))


class Ranks:
    """The measurements of this rank among the others; every rank calls the same in the same order."""

    def __init__(self, dist: Any, torch: Any, device: str, seat: Seat) -> None:
        self._dist = dist
        self._torch = torch
        self._device = device
        self._seat = seat

    def slowest(self, seconds: float) -> float:
        """Return the most that any rank gives, so that all decide alike."""
        value = self._torch.tensor([seconds], dtype=self._torch.float32, device=self._device)
        self._dist.all_reduce(value, self._dist.ReduceOp.MAX)
        return float(value.item())

    def collective(self, kind: preflight.Kind, size: int) -> Collective:
        """Time one collective over all ranks; each rank holds ``size`` bytes."""
        # All-to-all splits a message into equal parts.
        count = max(1, size // 4 // self._seat.world) * self._seat.world
        data, other = self._floats(count), self._floats(count)
        if kind == "all-reduce":
            seconds = self._timed(lambda: self._dist.all_reduce(data))
        else:
            seconds = self._timed(lambda: self._dist.all_to_all_single(other, data))
        return Collective(kind, 4 * count, seconds, preflight.bus_bandwidth(kind, self._seat.world, 4 * count, seconds))

    def links(self, pairs: tuple[tuple[int, int], ...], names: dict[int, str]) -> Link | None:
        """Measure one round's pairs at once; return this rank's if it is the first of its pair."""
        mine = next((pair for pair in pairs if self._seat.rank in pair), None)
        large = preflight.LINK_BYTES["nccl" if self._device == "cuda" else "gloo"]
        times = [
            self._timed(functools.partial(self.exchange, mine, self._floats(size // 4))) / 2 for size in (4, large)
        ]
        if mine is None or mine[0] != self._seat.rank:
            return None
        first, second = (f"{names[rank]} (rank {rank})" for rank in mine)
        return Link(first, second, times[0], large / times[1])

    def exchange(self, pair: tuple[int, int] | None, data: Any) -> None:
        """Send ``data`` to the other rank of the pair and take it back; a rank without a pair waits."""
        if pair is None:
            return
        first, second = pair
        if self._seat.rank == first:
            self._dist.send(data, second)
            self._dist.recv(data, second)
        else:
            self._dist.recv(data, first)
            self._dist.send(data, first)

    def _floats(self, count: int) -> Any:
        return self._torch.zeros(count, dtype=self._torch.float32, device=self._device)

    def _timed(self, act: Callable[[], object]) -> float:
        """Return the median time of ``act``, all ranks starting together; the first time is not counted."""
        times = []
        for _ in range(_REPEATS + 1):
            self._dist.barrier()
            began = time.perf_counter()
            act()
            if self._device == "cuda":
                self._torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])
