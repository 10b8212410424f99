"""Published rules that plan from a model or from several signals, written anew with one knob each.

Each sees the pool exactly and at once, and knows the prices of the model; none knows what will come. Where a
publication leaves a number open, the knob takes its place. Sources: NVIDIA Dynamo's planner (docs/planner, throughput
and load loop), TokenScale (arXiv 2512.03416), HeteroScale (arXiv 2508.19559), llm-d's workload variant autoscaler
(queue model of its analyzer), Kubernetes' HPA on a queue.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from bench.scaling.pool import BATCH, ITL, PRICES, TTFT, Rule
from bench.scaling.rules import MOST, bounded, held

if TYPE_CHECKING:
    from bench.scaling.pool import Pool
    from bench.scaling.workloads import Arrival

#: Seconds between two decisions: HPA and WVA's, Dynamo's two loops.
_EVERY, _THROUGHPUT, _LOAD = 15, 180, 5
#: Seconds of arrivals that WVA and HeteroScale look at, and TokenScale, which answers bursts.
_MINUTE, _SHORT = 60, 10
#: Dynamo's load loop lets a group go only when the others would stay below this share of the objective.
_SENSITIVITY = 0.8


class _Shape(NamedTuple):
    """Requests per second; means in tokens."""

    rate: float
    prompt: float
    uncached: float
    output: float

    def capacity(self) -> tuple[float, float]:
        """Return the requests per second of one prefill and of one decode group at full use."""
        batch, step = batch_within(self.prompt, self.output)
        return 1 / PRICES.prefill(int(self.uncached), int(self.prompt - self.uncached)), batch / (self.output * step)


class _Recent:
    """Arrivals of the last ``length`` seconds."""

    def __init__(self, length: int) -> None:
        self._came: deque[list[Arrival]] = deque(maxlen=length)

    def see(self, pool: Pool) -> None:
        """Remember this tick."""
        self._came.append(pool.came)

    def shape(self) -> _Shape:
        """Return requests per second, and the means of prompts, what is not cached of them, and answers."""
        requests = [request for came in self._came for request in came]
        if not requests:
            return _Shape(0.0, 0.0, 0.0, 0.0)
        count = len(requests)
        prompt, cached = sum(r.prompt for r in requests) / count, sum(r.cached for r in requests) / count
        return _Shape(count / len(self._came), prompt, prompt - cached, sum(r.output for r in requests) / count)


def batch_within(prompt: float, output: float) -> tuple[int, float]:
    """Return the largest batch whose step keeps ITL, at least 1, and the time of that step."""
    context = prompt + output / 2
    batch = next((size for size in range(BATCH, 1, -1) if PRICES.step(size, size * context) <= ITL), 1)
    return batch, PRICES.step(batch, batch * context)


class Throughput(Rule):
    """Dynamo's throughput loop: ceil(rate / engine rate) every 180 s from the last interval's means (its constant
    predictor). The planner plans for full use; ``use`` is the share of it to plan for, its knob here."""

    def __init__(self, use: float) -> None:
        self._use = use
        self._recent = _Recent(_THROUGHPUT)

    def decide(self, pool: Pool) -> tuple[int, int]:
        """See :class:`bench.scaling.pool.Rule`."""
        self._recent.see(pool)
        return self.floor(pool) if pool.now % _THROUGHPUT == 0 else pool.wanted

    def floor(self, pool: Pool) -> tuple[int, int]:
        """Return what the last interval's rate takes."""
        shape = self._recent.shape()
        rate = shape.rate
        if not rate:
            return bounded((1, 1), pool.workload)
        prefill, decode = shape.capacity()
        return bounded((rate / prefill / self._use, rate / decode / self._use), pool.workload)


class TwoLoops(Rule):
    """Dynamo's two loops: throughput's numbers are a floor, beside which every 5 s one group of a role comes when the
    estimated TTFT (ITL) exceeds its objective, or goes when one fewer would keep 80 % of it; nothing happens while
    groups start. ``use`` as above."""

    def __init__(self, use: float) -> None:
        self._slow = Throughput(use)
        self._floor = (1, 1)

    def decide(self, pool: Pool) -> tuple[int, int]:
        """See :class:`bench.scaling.pool.Rule`."""
        self._slow.decide(pool)
        if pool.now % _THROUGHPUT == 0:
            self._floor = self._slow.floor(pool)
        starting = any(at > pool.now for at in pool.decode) or any(at > pool.now for at in pool.starting)
        if pool.now % _LOAD or starting:
            return pool.wanted
        prefill, decode = pool.wanted
        wish = (self._prefill(pool, prefill), self._decode(pool, decode))
        return bounded((max(wish[0], self._floor[0]), max(wish[1], self._floor[1])), pool.workload)

    @staticmethod
    def _prefill(pool: Pool, now: int) -> int:
        queued = pool.backlog()
        own = PRICES.prefill(3000, 0)
        if queued / now + own > TTFT:
            return now + 1
        fewer = now > 1 and queued / (now - 1) < (TTFT - own) * _SENSITIVITY
        return now - 1 if fewer else now

    @staticmethod
    def _decode(pool: Pool, now: int) -> int:
        there, context = len(pool.running) + len(pool.entering), pool.context
        if there > now * BATCH or PRICES.step(there / now, context / now) > ITL:
            return now + 1
        fewer = now > 1 and there / (now - 1) < BATCH
        if fewer and PRICES.step(there / (now - 1), context / (now - 1)) < ITL * _SENSITIVITY:
            return now - 1
        return now


class TokenVelocity(Rule):
    """TokenScale: tokens that arrive over what a group takes in (prefill) or lets go (decode), times ``factor``; decode
    groups are convertible: they prefill in chunks while all prefill groups are busy, as far as ITL allows."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._recent = _Recent(_SHORT)
        self._wishes: deque[tuple[float, tuple[int, int]]] = deque()

    def decodes(self, pool: Pool, request: Arrival, at: float) -> bool:  # noqa: ARG002 - any prompt
        """See :class:`bench.scaling.pool.Rule`."""
        return pool.prefill[0] > at

    def decide(self, pool: Pool) -> tuple[int, int]:
        """See :class:`bench.scaling.pool.Rule`."""
        self._recent.see(pool)
        shape = self._recent.shape()
        rate = shape.rate
        if not rate:
            return held(self._wishes, pool, bounded((1, 1), pool.workload))
        prefill, decode = shape.capacity()
        wish = bounded((rate / prefill * self._factor, rate / decode * self._factor), pool.workload)
        return held(self._wishes, pool, wish)


class DecodeTokens(Rule):
    """HeteroScale: decode tokens per second over ``target`` of a group's most, beyond a tenth of tolerance; prefill by
    a fixed ratio, 10 % more of both when TTFT is missed and 20 % when it is missed by far."""

    def __init__(self, target: float, ratio: float) -> None:
        self._target, self._ratio = target, ratio
        self._steps: deque[float] = deque(maxlen=_MINUTE + 1)
        self._wishes: deque[tuple[float, tuple[int, int]]] = deque()

    def decide(self, pool: Pool) -> tuple[int, int]:
        """See :class:`bench.scaling.pool.Rule`."""
        self._steps.append(pool.written)
        if pool.now % _EVERY or len(self._steps) < _EVERY:
            return pool.wanted
        rate = (self._steps[-1] - self._steps[0]) / (len(self._steps) - 1)
        most = BATCH / PRICES.step(BATCH, BATCH * 3100)
        need = rate / (most * self._target)
        now = pool.wanted[1]
        decode = math.ceil(need) if abs(need / now - 1) > 0.1 else now
        waits = pool.now - pool.queue[0].at if pool.queue else 0.0
        guard = 1.2 if waits > 2 * TTFT else 1.1 if waits > TTFT else 1.0
        decode = max(decode, math.ceil(now * guard)) if guard > 1 else decode
        return held(self._wishes, pool, bounded((decode * self._ratio, decode), pool.workload))


class QueueModel(Rule):
    """WVA's queue model: the greatest rate at which M/M/1 keeps TTFT, and the largest batch keeps ITL; load over
    ``share`` of that rate."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._recent = _Recent(_MINUTE)
        self._wishes: deque[tuple[float, tuple[int, int]]] = deque()

    def decide(self, pool: Pool) -> tuple[int, int]:
        """See :class:`bench.scaling.pool.Rule`."""
        self._recent.see(pool)
        shape = self._recent.shape()
        rate = shape.rate
        if pool.now % _EVERY or not rate:
            return pool.wanted
        rate += pool.waiting() / _MINUTE
        service, decode = shape.capacity()
        left = max(1e-3, TTFT - PRICES.pull(int(shape.prompt)) - PRICES.step(1, shape.prompt))
        best = max(0.05 * service, service - 1 / left)
        wish = (rate / (best * self._share), rate / (decode * self._share))
        return held(self._wishes, pool, bounded(wish, pool.workload))


class QueueLength(Rule):
    """HPA on queues: requests that wait for prefill, and those at decode beyond four fifths of its batches, for each
    group; ceil(now x queue / ``target``), the highest wish of the last 300 s."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._wishes: deque[tuple[float, tuple[int, int]]] = deque()

    def decide(self, pool: Pool) -> tuple[int, int]:
        """See :class:`bench.scaling.pool.Rule`."""
        if pool.now % _EVERY:
            return pool.wanted
        decode = (len(pool.running) + len(pool.entering)) / (0.8 * BATCH)
        wish = (min(pool.waiting() / self._target, 2.0 * pool.wanted[0] + 4), min(decode, float(MOST)))
        return held(self._wishes, pool, bounded(wish, pool.workload))
