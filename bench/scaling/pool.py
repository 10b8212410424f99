"""A pool in virtual time whose numbers of groups change: one router, queues for prefill, shared steps for decode.

The router holds requests back as Twinpool's does with an objective, for every rule: as many are at the workers as
decode groups have places, and prefill groups have no more than half the objective to do; the others wait in its queue,
whose order turns to newest first once the oldest has waited half the objective, and are turned away after 30 s.
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
#: How long the oldest request waits in seconds before the newest goes first.
_HALF = TTFT / 2
#: Seconds over which the use of prefill groups is a mean.
_MEMORY = 8
#: Seconds until a group serves in its other role: routers are told, and what a decode group writes is written.
_TOLD, _DRAINED = 2.0, 10.0
#: How long a request may wait at the router.
_PATIENCE = 30.0


def work_of(request: Arrival) -> float:
    """Return the seconds of prefill that a request takes by the model."""
    return PRICES.prefill(request.prompt - request.cached, request.cached)


class Rule(Protocol):
    """Decides how many groups there should be, every tick."""

    def decide(self, pool: Pool) -> tuple[int, int]:
        """Return prefill and decode groups to have."""

    def ahead(self, pool: Pool) -> float:  # noqa: ARG002 - of others it is
        """Return the seconds that prefill groups may have to do before the router holds requests back."""
        return _HALF

    def decodes(self, pool: Pool, request: Arrival, at: float) -> bool:  # noqa: ARG002 - of others it is
        """Return whether a decode group computes this prompt, if it can without breaking ITL."""
        return False

    def lends(self, pool: Pool) -> bool:  # noqa: ARG002 - of others it is
        """Return whether a prefill group does all of a request for which decode groups have no place."""
        return False

    def shifts(self, pool: Pool) -> int:  # noqa: ARG002 - of others it is
        """Return 1 to have a prefill group serve as a decode group from now on, -1 for the reverse, else 0."""
        return 0


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
    #: Requests that were turned away, and those that are at workers.
    refused: int = 0
    admitted: int = 0
    #: When places are free again in this second.
    freed: deque[float] = field(default_factory=deque)
    #: Prompts that are at prefill groups: when they begin and end, and their seconds by the model.
    sent: list[tuple[float, float, float]] = field(default_factory=list)
    number: int = 0
    #: Tokens written so far, over all decode groups.
    written: float = 0.0
    #: When prefill groups that were ordered begin to serve.
    starting: list[float] = field(default_factory=list)
    #: Prompts that decode groups compute: from when to when.
    chunks: list[tuple[float, float]] = field(default_factory=list)
    #: Requests that prefill groups do all of, by the time at which they end, with when their first token came.
    lent: list[tuple[float, int, float, Arrival]] = field(default_factory=list)
    #: Seconds of prefill in each second, over the last few.
    use: float = 0.0
    #: Groups made for prefill that serve as decode groups; below 0 the reverse.
    shifted: int = 0

    def serving(self) -> int:
        """Return the prefill groups that serve."""
        return len(self.prefill) - sum(at > self.now for at in self.starting)

    def ready(self) -> int:
        """Return the decode groups that serve."""
        return sum(at <= self.now for at in self.decode)

    def waiting(self) -> int:
        """Return the requests whose prefill has not begun."""
        return len(self.queue) + sum(begin > self.now for begin, _, _ in self.sent)

    def backlog(self) -> float:
        """Return the seconds of prefill by the model that wait or are not done."""
        return sum(map(work_of, self.queue)) + sum(work for _, end, work in self.sent if end > self.now)


def run(workload: Workload, requests: Sequence[Arrival], rule: Rule, first: tuple[int, int]) -> Result:
    """Return what comes of a rule that begins with ``first`` groups, which serve from the start."""
    pool = Pool(workload, wanted=first, prefill=[0.0] * first[0], decode=[0.0] * first[1])
    coming, gpu_seconds, changes = deque(requests), 0.0, 0
    while pool.now < LENGTH or (len(pool.ended) + pool.refused < len(requests) and pool.now < LENGTH + _TAIL):
        pool.now += 1.0
        pool.came = []
        while coming and coming[0].at <= pool.now:
            pool.came.append(coming.popleft())
        pool.queue.extend(pool.came)
        if workload.loss is not None and pool.now == workload.loss:
            _lose(pool)
        _foresee(pool)
        _shift(pool, rule)
        before = pool.busy
        _prefill(pool, rule)
        pool.use += (pool.busy - before - pool.use) / _MEMORY
        _written(pool)
        _decode(pool)
        wanted = max(1, pool.wanted[0] - pool.shifted)
        leaving = sum(free > pool.now for free in pool.prefill) if len(pool.prefill) > wanted else 0
        gpu_seconds += max(wanted, min(len(pool.prefill), wanted + leaving)) + len(pool.decode)
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


def _next(pool: Pool, at: float) -> tuple[Arrival, float] | None:
    """Take the request that the router lets go next, at ``at`` or when one comes and a place is free in this second."""
    if not pool.queue:
        return None
    at = max(at, pool.queue[0].at)
    if pool.admitted >= pool.ready() * BATCH:
        if not pool.freed:
            return None
        at = max(at, pool.freed.popleft())
    pool.admitted += 1
    return _pop(pool, at), at


def _pop(pool: Pool, at: float) -> Arrival:
    place = 0
    if pool.queue[0].at < at - _HALF:
        place = next(back for back in range(len(pool.queue) - 1, -1, -1) if pool.queue[back].at <= at)
    request = pool.queue[place]
    del pool.queue[place]
    return request


def _foresee(pool: Pool) -> None:
    """Turn away who waited too long, and foresee when requests end in this second: their places are free again then."""
    begin = pool.now - 1.0
    while pool.queue and pool.queue[0].at < begin - _PATIENCE:
        pool.queue.popleft()
        pool.refused += 1
    pool.freed.clear()
    ready = pool.ready()
    if not ready or not pool.running or pool.admitted + len(pool.queue) < ready * BATCH:
        return
    step = _step(pool, ready)
    ends = sorted(end for end, *_ in pool.running if end < pool.steps + 1.0 / step)
    pool.freed.extend(begin + (end - pool.steps) * step for end in ends)


def _step(pool: Pool, ready: int) -> float:
    """Return the seconds of one step of all batches together. Beside a chunk a step takes as long as it may."""
    step = PRICES.step(max(1, len(pool.running)) / ready, pool.context / ready) * pool.workload.slow
    beside = sum(min(end, pool.now) - max(begin, pool.now - 1.0) for begin, end in pool.chunks if begin < pool.now)
    return step + max(0.0, ITL - step) * min(1.0, beside / ready)


def _prefill(pool: Pool, rule: Rule) -> None:
    """Give prompts to prefill groups, or to decode groups where the rule says so, as the router lets them go."""
    begin = pool.now - 1.0
    pool.sent = [prompt for prompt in pool.sent if prompt[1] > begin]
    pool.chunks = [chunk for chunk in pool.chunks if chunk[1] > begin]
    while pool.prefill and pool.prefill[0] - rule.ahead(pool) <= pool.now:
        found = _next(pool, max(begin, pool.prefill[0] - rule.ahead(pool)))
        if found is None:
            if not pool.queue or not rule.lends(pool):
                return
            _lend(pool, rule.ahead(pool))
            continue
        request, at = found
        end = _convert(pool, request, at) if rule.decodes(pool, request, at) else None
        if end is None:
            start, work = max(at, pool.prefill[0]), work_of(request)
            slowed = _slowed(pool)
            end = start + work * pool.workload.slow * slowed
            pool.sent.append((start, end, work))
            pool.busy += (end - start) / slowed
            heapq.heapreplace(pool.prefill, end)
            end += PRICES.pull(request.prompt)
        pool.number += 1
        heapq.heappush(pool.handed, (end, pool.number, request))


def _slowed(pool: Pool) -> float:
    """Return how much longer prompts take beside the answers that prefill groups write: in each ITL one step of those.

    Cautious: a step that reads a prompt too writes the answers' tokens nearly for nothing.
    """
    if not pool.lent:
        return 1.0
    groups = max(1, pool.serving())
    context = sum(request.prompt + request.output / 2 for *_, request in pool.lent)
    step = PRICES.step(len(pool.lent) / groups, context / groups) * pool.workload.slow
    return 1 / max(0.1, 1 - step / ITL)


def _lend(pool: Pool, ahead: float) -> None:
    """Let a prefill group do all of the next request; it writes a token in each ITL, the least that is promised."""
    begin = pool.now - 1.0
    at = max(begin, pool.prefill[0] - ahead, pool.queue[0].at)
    request = _pop(pool, at)
    start, work = max(at, pool.prefill[0]), work_of(request)
    end = start + work * pool.workload.slow * _slowed(pool)
    pool.sent.append((start, end, work))
    pool.busy += work * pool.workload.slow
    heapq.heapreplace(pool.prefill, end)
    pool.number += 1
    heapq.heappush(pool.lent, (end + request.output * ITL, pool.number, end + ITL, request))


def _written(pool: Pool) -> None:
    """Let the answers go that prefill groups have written."""
    while pool.lent and pool.lent[0][0] <= pool.now:
        _, _, first, request = heapq.heappop(pool.lent)
        pool.ended.append(request)
        pool.met += first - request.at <= TTFT


def _shift(pool: Pool, rule: Rule) -> None:
    """Let a group change its role as the rule says, once it has ended its prompt or its answers."""
    way = rule.shifts(pool)
    pool.shifted += way
    if way > 0:
        free = min(pool.prefill)
        pool.prefill.remove(free)
        heapq.heapify(pool.prefill)
        pool.decode.append(max(free, pool.now) + _TOLD)
    elif way < 0:
        pool.decode.remove(min(pool.decode))
        heapq.heappush(pool.prefill, pool.now + _DRAINED)


def _convert(pool: Pool, request: Arrival, at: float) -> float | None:
    """Let a decode group compute a prompt, in chunks that keep each step within ITL; return when it will have.

    None where all groups do so already, or have no time for it.
    """
    ready = pool.ready()
    if not ready or sum(begin <= at < end for begin, end in pool.chunks) >= ready:
        return None
    chunk = _chunk(len(pool.running) / ready, pool.context / ready, pool.workload.slow)
    if not chunk:
        return None
    end = at + math.ceil((request.prompt - request.cached) / chunk) * ITL
    pool.chunks.append((at, end))
    return end


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
    """Write for a second: each request joins when its KV is there and a place is free, and leaves with its last token.

    The batches of all groups step together, in the time that the batch at the beginning of the second takes.
    """
    ready, begin = pool.ready(), pool.now - 1.0
    while pool.handed and pool.handed[0][0] <= pool.now:
        at, _, request = heapq.heappop(pool.handed)
        pool.entering.append((at, request))
    if not ready or not (pool.running or pool.entering):
        return
    step = _step(pool, ready)
    last = pool.steps + 1.0 / step
    pool.written += min(ready * BATCH, len(pool.running) + len(pool.entering) / 2) / step
    while pool.entering:
        at, request = pool.entering[0]
        joins = max(at, begin)
        while len(pool.running) >= ready * BATCH and pool.running[0][0] <= last:
            joins = max(joins, _end(pool, step))
        if len(pool.running) >= ready * BATCH:
            break
        pool.entering.popleft()
        pool.number += 1
        entry = pool.steps + (joins - begin) / step + request.output
        heapq.heappush(pool.running, (entry, pool.number, joins, request))
        pool.context += request.prompt + request.output / 2
    while pool.running and pool.running[0][0] <= last:
        _end(pool, step)
    pool.steps = last


def _end(pool: Pool, step: float) -> float:
    """Let the request that is done first go, and return when it is."""
    end, _, began, request = heapq.heappop(pool.running)
    finish = pool.now - 1.0 + (end - pool.steps) * step
    pool.context -= request.prompt + request.output / 2
    pool.ended.append(request)
    pool.admitted -= 1
    itl = max(step, (finish - began) / request.output)
    pool.met += began + step - request.at <= TTFT and itl <= ITL
    return finish


def _resize(pool: Pool, target: tuple[int, int]) -> None:
    pool.wanted = target
    target = max(1, target[0] - pool.shifted), max(1, target[1] + pool.shifted)
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
