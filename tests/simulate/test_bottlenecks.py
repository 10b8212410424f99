"""Six bottlenecks planted in simulated pools: ``twinpool explain`` must name each from what the pool counted.

What is planted is a cause (a slow link, one slow worker, too small a cache), never the observation. Two more causes are
none of the simulator's: skewed experts and groups that start are planted in ``tests/cli/test_explain_engines.py``.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core.bottleneck import Observation, Worker, find
from twinpool.core.economics import ASSUMED
from twinpool.simulate import pool as simulated
from twinpool.simulate.engines import DecodeWorker, Job, Link, PrefillWorker
from twinpool.simulate.pool import Setup, simulate
from twinpool.simulate.scores import score
from twinpool.simulate.traces import BLOCK_TOKENS, Request

if TYPE_CHECKING:
    from collections.abc import Callable

#: Well sized for the traces below: none of its stages waits.
SETUP = Setup(ASSUMED, prefill=4, decode=4, prefill_cache=2_000_000, decode_capacity=600_000, rule="least-load")
TTFT, ITL = 1.0, 0.05


@dataclass
class Timeline:
    """When each request passed from one stage to the next; filled by the patched workers."""

    submitted: dict[int, float] = field(default_factory=dict)
    prefilled: dict[int, float] = field(default_factory=dict)
    computed: dict[int, float] = field(default_factory=dict)
    admitted: dict[int, float] = field(default_factory=dict)
    joined: dict[int, float] = field(default_factory=dict)
    decoded_by: dict[int, int] = field(default_factory=dict)
    prefilled_by: dict[int, int] = field(default_factory=dict)


def record(monkeypatch: pytest.MonkeyPatch) -> Timeline:
    """Have all workers write down what they do with each job."""
    seen = Timeline()
    submit, end, take, join = PrefillWorker.submit, PrefillWorker._end, DecodeWorker.submit, DecodeWorker._join
    start, over = PrefillWorker._start, PrefillWorker.hand_over

    def submitting(self: PrefillWorker, job: Job) -> None:
        seen.submitted[id(job)] = self._clock.now
        seen.prefilled_by[id(job)] = id(self)
        submit(self, job)

    def starting(self: PrefillWorker) -> None:
        job, worked = self._queue[0], self.worked
        start(self)
        seen.computed[id(job)] = self.worked - worked

    def ending(self: PrefillWorker, job: Job) -> None:
        seen.prefilled[id(job)] = self._clock.now
        end(self, job)

    def taking(self: DecodeWorker, job: Job, source: PrefillWorker | None) -> None:
        seen.decoded_by[id(job)] = id(self)
        take(self, job, source)

    def handing(
        self: PrefillWorker, tokens: int, done: Callable[[], None], failed: Callable[[], None], sink: Link | None
    ) -> None:
        began = self._clock.now
        (job,) = done.__defaults__ or ()  # type: ignore[attr-defined]
        seen.admitted[id(job)] = began
        over(self, tokens, done, failed, sink)

    def joining(self: DecodeWorker, job: Job) -> None:
        seen.joined[id(job)] = self._clock.now
        join(self, job)

    for kind, name, method in (
        (PrefillWorker, "submit", submitting), (PrefillWorker, "_start", starting), (PrefillWorker, "_end", ending),
        (PrefillWorker, "hand_over", handing), (DecodeWorker, "submit", taking), (DecodeWorker, "_join", joining),
    ):  # fmt: skip
        monkeypatch.setattr(kind, name, method)
    return seen


def observe(
    monkeypatch: pytest.MonkeyPatch,
    trace: tuple[Request, ...],
    setup: Setup = SETUP,
    spoil: Callable[[simulated.Pool], None] = lambda _: None,
) -> Observation:
    """Simulate a pool, after ``spoil`` did something to it; return what routers and engines would have counted."""
    seen, pools, made = record(monkeypatch), [], simulated.Pool

    def build(*arguments: Any) -> simulated.Pool:
        pools.append(made(*arguments))
        spoil(pools[0])
        return pools[0]

    monkeypatch.setattr(simulated, "Pool", build)
    jobs = simulate(trace, setup)
    (pool,) = pools
    judged = score(jobs, TTFT, ITL)
    stages: dict[Any, float] = defaultdict(float)
    for job in jobs:
        key = id(job)
        compute = seen.computed[key]
        stages["prefill queue"] += seen.prefilled[key] - seen.submitted[key] - compute
        stages["prefill"] += compute
        stages["pull"] += seen.joined[key] - seen.admitted[key]
        stages["decode start"] += seen.admitted[key] - seen.prefilled[key] + job.first - seen.joined[key]
    waits = sum(job.first - job.request.arrival for job in jobs)
    assert sum(stages.values()) == pytest.approx(waits), "every second of the time to the first token is in one stage"
    half = len(jobs) // 2
    return Observation(
        window=trace[-1].arrival,
        requests=len(jobs),
        stages=stages,
        ttft_p99=judged.ttft_p99,
        itl_p99=judged.itl_p99,
        ttft_objective=TTFT,
        itl_objective=ITL,
        workers=(*_prefill(pool, jobs, seen, setup.prefill_cache // BLOCK_TOKENS), *_decode(pool, jobs, seen)),
        wanted={"prefill": setup.prefill, "decode": setup.decode},
        routable={"prefill": setup.prefill, "decode": setup.decode},
        gpus={"prefill": 8, "decode": 8},
        hit_share=_hits(jobs[half:]),
        hit_share_ever=_hits(jobs[:half]),
        pulled_bytes=sum(job.request.prompt for job in jobs) * 1e5,
        pull_seconds=stages["pull"],
        simulated=True,
    )


def _hits(jobs: list[Job]) -> float:
    return sum(job.hit for job in jobs) / sum(job.request.prompt for job in jobs)


def _prefill(pool: simulated.Pool, jobs: list[Job], seen: Timeline, blocks: int) -> list[Worker]:
    found = []
    for member in pool.prefill:
        name, worker = member.name, member.engine
        mine = [id(job) for job in jobs if seen.prefilled_by[id(job)] == id(worker)]
        busy = sum(seen.prefilled[key] - seen.submitted[key] for key in mine) / jobs[-1].request.arrival
        found.append(Worker(name, "prefill", in_flight=busy, kv_used=len(worker.cache) / blocks))
    return found


def _decode(pool: simulated.Pool, jobs: list[Job], seen: Timeline) -> list[Worker]:
    found = []
    for member in pool.decode:
        name, worker = member.name, member.engine
        mine = [job for job in jobs if seen.decoded_by[id(job)] == id(worker)]
        tokens = sum(job.request.output - 1 for job in mine)
        spent = sum(job.finish - job.first for job in mine)
        found.append(Worker(name, "decode", spent / jobs[-1].request.arrival, seconds_per_token=spent / tokens))
    return found


def poisson(count: int, rate: float, prompt: int = 2000, output: int = 100) -> tuple[Request, ...]:
    """Return requests that share nothing."""
    dice, moment, found = random.Random(1), 0.0, []
    for number in range(count):
        moment += dice.expovariate(rate)
        blocks = tuple(range(number * 1000, number * 1000 + prompt // BLOCK_TOKENS))
        found.append(Request(moment, prompt, output, blocks))
    return tuple(found)


def families(count: int, kinds: int, rate: float, start: float = 0.0) -> list[Request]:
    """Return requests that begin like one of ``kinds`` others, in turn."""
    dice, moment, found = random.Random(2), start, []
    for number in range(count):
        moment += dice.expovariate(rate)
        first = (number % kinds) * 1000
        found.append(Request(moment, 12 * BLOCK_TOKENS + 50, 50, tuple(range(first, first + 12))))
    return found


def test_a_pool_that_is_well_keeps_its_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(observe(monkeypatch, poisson(400, 8))).within_objectives is True


def test_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(observe(monkeypatch, poisson(400, 40), replace(SETUP, prefill=1)))
    assert (found.cause, found.within_objectives) == ("queue", False)
    assert "prefill" in found.resource


def test_prefill_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    found = find(observe(monkeypatch, poisson(200, 0.5, prompt=40_000)))
    assert (found.cause, found.within_objectives) == ("prefill compute", False)


def test_transfer_link(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(ASSUMED, pull_token=ASSUMED.pull_token * 200)
    found = find(observe(monkeypatch, poisson(300, 2), replace(SETUP, prices=slow)))
    assert (found.cause, found.within_objectives) == ("transfer link", False)


def test_decode_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = replace(ASSUMED, weights=ASSUMED.weights * 8, context=ASSUMED.context * 8)
    found = find(observe(monkeypatch, poisson(300, 4, output=200), replace(SETUP, prices=slow)))
    assert (found.cause, found.within_objectives) == ("decode bandwidth", False)


def test_hot_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(pool: simulated.Pool) -> None:
        pool.decode[2].engine._prices = ASSUMED.scaled(12)

    found = find(observe(monkeypatch, poisson(400, 8), spoil=spoil))
    assert (found.cause, found.within_objectives) == ("hot worker", False)
    assert found.resource == "the worker d2"


def test_cache_thrash(monkeypatch: pytest.MonkeyPatch) -> None:
    few = families(300, 4, 4)
    trace = (*few, *families(300, 600, 4, start=few[-1].arrival))
    found = find(observe(monkeypatch, trace, replace(SETUP, prefill_cache=80_000)))
    assert found.cause == "cache thrash"


def test_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(observe(monkeypatch, poisson(5, 1))).cause == "not enough data"
