"""A pool in virtual time whose numbers of groups change: one queue for prefill, shared steps for decode.

Coarser than ``twinpool.simulate``: decisions and decode steps happen on ticks of a second. Groups that are let go end
what they do first, and count until then.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from bench.scaling.workloads import LENGTH
from twinpool.core.economics import prices_of
from twinpool.core.kv import SHAPES
from twinpool.core.timing import ACCELERATORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.scaling.workloads import Arrival, Workload

#: What planners assume; the workload says how much longer engines take.
PRICES = prices_of(SHAPES["llama-3-8b"], ACCELERATORS["h100"])
#: Sequences that a decode group runs at once.
BATCH = 64
TTFT, ITL = 1.0, 0.03
#: A run goes on so long until everything has been answered.
_TAIL = 600


def work_of(request: Arrival) -> float:
    """Return the seconds of prefill that a request takes by the model."""
    return PRICES.prefill(request.prompt - request.cached, request.cached)


class Rule(Protocol):
    """Decides how many groups there should be, every tick."""

    def decide(self, pool: Pool) -> tuple[int, int]:
        """Return prefill and decode groups to have."""


@dataclass(slots=True)
class Result:
    """What came of a run: share of requests within both objectives, GPU hours, changes of the numbers."""

    attained: float
    gpu_hours: float
    changes: int


@dataclass(slots=True)
class Pool:
    """The state that rules may look at."""

    workload: Workload
    now: float = 0.0
    wanted: tuple[int, int] = (1, 1)
    #: When each prefill group is free next, and when decode groups came to serve.
    prefill: list[float] = field(default_factory=lambda: [0.0])
    decode: list[float] = field(default_factory=lambda: [0.0])
    queue: deque[Arrival] = field(default_factory=deque)
    #: Requests between prefill and decode, by the time at which they get there; then those that wait for a place.
    handed: list[tuple[float, int, Arrival]] = field(default_factory=list)
    entering: deque[tuple[float, Arrival]] = field(default_factory=deque)
    #: Requests that are written, by the step at which they end, with when they began.
    running: list[tuple[float, int, float, Arrival]] = field(default_factory=list)
    steps: float = 0.0
    context: float = 0.0
    busy: float = 0.0
    came: list[Arrival] = field(default_factory=list)
    ended: list[Arrival] = field(default_factory=list)
    met: int = 0
    number: int = 0
    #: Tokens written so far, over all decode groups.
    written: float = 0.0
    #: When prefill groups that were ordered begin to serve.
    starting: list[float] = field(default_factory=list)
    #: Until when decode groups that prefill for a while do so; the seconds of one step beside such a chunk.
    converted: list[float] = field(default_factory=list)

    def ready(self) -> int:
        """Return the decode groups that serve."""
        return sum(at <= self.now for at in self.decode)


def run(workload: Workload, requests: Sequence[Arrival], rule: Rule, first: tuple[int, int]) -> Result:
    """Return what comes of a rule that begins with ``first`` groups, which serve from the start."""
    pool = Pool(workload, wanted=first, prefill=[0.0] * first[0], decode=[0.0] * first[1])
    coming, gpu_seconds, changes = deque(requests), 0.0, 0
    while pool.now < LENGTH or (len(pool.ended) < len(requests) and pool.now < LENGTH + _TAIL):
        pool.now += 1.0
        pool.came = []
        while coming and coming[0].at <= pool.now:
            pool.came.append(coming.popleft())
        pool.queue.extend(pool.came)
        if workload.loss is not None and pool.now == workload.loss:
            _lose(pool)
        _prefill(pool)
        if getattr(rule, "convertible", False):
            _convert(pool)
        _decode(pool)
        leaving = sum(free > pool.now for free in pool.prefill) if len(pool.prefill) > pool.wanted[0] else 0
        gpu_seconds += max(pool.wanted[0], min(len(pool.prefill), pool.wanted[0] + leaving)) + len(pool.decode)
        target = rule.decide(pool)
        changes += target != pool.wanted
        _resize(pool, target)
    return Result(pool.met / max(1, len(requests)), gpu_seconds / 3600, changes)


def _lose(pool: Pool) -> None:
    """Have half of the groups of both roles begin anew. What they did goes on elsewhere, which flatters every rule."""
    again = pool.now + pool.workload.start
    pool.prefill = [again if place % 2 else free for place, free in enumerate(sorted(pool.prefill))]
    pool.decode = [again if place % 2 else at for place, at in enumerate(sorted(pool.decode))]
    pool.starting += [again] * (len(pool.prefill) // 2)
    heapq.heapify(pool.prefill)


def _prefill(pool: Pool) -> None:
    begin = pool.now - 1.0
    while pool.queue and pool.prefill and pool.prefill[0] <= pool.now:
        request = pool.queue.popleft()
        start = max(request.at, pool.prefill[0], begin)
        seconds = work_of(request) * pool.workload.slow
        pool.busy += seconds
        heapq.heapreplace(pool.prefill, start + seconds)
        pool.number += 1
        heapq.heappush(pool.handed, (start + seconds + PRICES.pull(request.prompt), pool.number, request))


def _convert(pool: Pool) -> None:
    """Let decode groups take prompts that would wait: in chunks that keep each step within ITL."""
    ready = pool.ready()
    pool.converted = [until for until in pool.converted if until > pool.now]
    while len(pool.queue) > len(pool.prefill) and len(pool.converted) < ready and pool.running:
        request = pool.queue.popleft()
        batch, context = len(pool.running) / ready, pool.context / ready
        chunk = _chunk(batch, context, pool.workload.slow)
        if not chunk:
            pool.queue.appendleft(request)
            return
        seconds = math.ceil((request.prompt - request.cached) / chunk) * ITL
        pool.converted.append(pool.now + seconds)
        pool.number += 1
        heapq.heappush(pool.handed, (pool.now + seconds, pool.number, request))


def _chunk(batch: float, context: float, slow: float) -> int:
    """Return the most prompt tokens that fit beside a batch in one step within ITL."""
    low, high = 0, 2048
    while low < high:
        middle = (low + high + 1) // 2
        if PRICES.mixed(middle, 0, batch, context) * slow <= ITL:
            low = middle
        else:
            high = middle - 1
    return low


def _decode(pool: Pool) -> None:
    ready = pool.ready()
    while pool.handed and pool.handed[0][0] <= pool.now:
        at, _, request = heapq.heappop(pool.handed)
        pool.entering.append((at, request))
    while pool.entering and len(pool.running) < ready * BATCH:
        at, request = pool.entering.popleft()
        waited = 0.0 if at > pool.now - 1.0 else pool.now - 0.5 - at
        pool.number += 1
        heapq.heappush(pool.running, (pool.steps + request.output, pool.number, at + waited, request))
        pool.context += request.prompt + request.output / 2
    if not pool.running or not ready:
        return
    step = PRICES.step(len(pool.running) / ready, pool.context / ready) * pool.workload.slow
    # Beside a chunk a step takes as long as it may; all batches are taken together.
    step += max(0.0, ITL - step) * len(pool.converted) / ready
    pool.steps += 1.0 / step
    pool.written += len(pool.running) / step
    while pool.running and pool.running[0][0] <= pool.steps:
        end, _, began, request = heapq.heappop(pool.running)
        finish = pool.now - (pool.steps - end) * step
        pool.context -= request.prompt + request.output / 2
        pool.ended.append(request)
        itl = max(step, (finish - began) / request.output)
        pool.met += began + step - request.at <= TTFT and itl <= ITL


def _resize(pool: Pool, target: tuple[int, int]) -> None:
    pool.wanted = target
    pool.starting = [at for at in pool.starting if at > pool.now]
    while len(pool.prefill) < target[0]:
        heapq.heappush(pool.prefill, pool.now + pool.workload.start)
        pool.starting.append(pool.now + pool.workload.start)
    while len(pool.prefill) > target[0]:
        pool.prefill.remove(max(pool.prefill) if max(pool.prefill) > pool.now + 5 else min(pool.prefill))
        heapq.heapify(pool.prefill)
    while len(pool.decode) < target[1]:
        pool.decode.append(pool.now + pool.workload.start)
    while len(pool.decode) > target[1]:
        pool.decode.remove(max(pool.decode))
