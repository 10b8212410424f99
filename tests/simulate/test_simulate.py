"""The simulator against closed forms, conservation, and the directions in which rules must differ."""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from twinpool.core.economics import ASSUMED, Prices
from twinpool.core.errors import InvalidValue
from twinpool.core.queueing import mean_wait
from twinpool.operator.logic.scaling import Limits
from twinpool.operator.logic.scaling_need import Group, Promise
from twinpool.router.logic.policy import Ask, Candidate
from twinpool.simulate import scores, traces
from twinpool.simulate.cache import Cache
from twinpool.simulate.capacity import greatest, greatest_rate
from twinpool.simulate.clock import Clock
from twinpool.simulate.engines import DecodeWorker, Job, PrefillWorker
from twinpool.simulate.fleet import Life
from twinpool.simulate.pool import Setup, simulate
from twinpool.simulate.rules import RULES, Seen
from twinpool.simulate.traces import Request
from twinpool.simulate.views import Events, Kind, View
from twinpool.simulate.whatif import Variant, demand, planned, run

if TYPE_CHECKING:
    from collections.abc import Sequence

#: One second for each prompt token, a step of a second, a pull of a hundredth for each token.
PLAIN = Prices(overhead=0.0, weights=1.0, context=0.0, token=1.0, pair=0.0, pull_setup=0.0, pull_token=0.01)


def rng(seed: int = 0) -> random.Random:
    return random.Random(seed)


def poisson(count: int, rate: float, seed: int, prompt: int = 1) -> list[Request]:
    dice, moment, found = rng(seed), 0.0, []
    for _ in range(count):
        moment += dice.expovariate(rate)
        found.append(Request(moment, prompt, 1))
    return found


def conversations(count: int, seed: int, rate: float = 4.0) -> tuple[Request, ...]:
    """Return requests of which many share long prefixes."""
    dice, moment, found = rng(seed), 0.0, []
    for number in range(count):
        moment += dice.expovariate(rate)
        family, length = dice.randrange(12), dice.randrange(4, 24)
        shared = [family * 1000 + place for place in range(dice.randrange(length))]
        own = [100_000 + number * 100 + place for place in range(length - len(shared))]
        found.append(Request(moment, length * traces.BLOCK_TOKENS + 100, dice.randrange(1, 200), (*shared, *own)))
    return tuple(found)


SETUP = Setup(ASSUMED, prefill=4, decode=3, prefill_cache=200_000, decode_capacity=300_000)


@pytest.mark.parametrize("use", [0.5, 0.8])
def test_a_prefill_worker_waits_as_long_as_m_d_1_says(use: float) -> None:
    waits = [_mean_wait_of_one_worker(use, seed) for seed in range(4)]
    assert statistics.fmean(waits) == pytest.approx(mean_wait(1, use, 1.0, services=0.0), rel=0.1)


def _mean_wait_of_one_worker(use: float, seed: int) -> float:
    clock = Clock()
    worker = PrefillWorker(clock, PLAIN, Cache(0))
    jobs = [Job(request) for request in poisson(6000, use, seed)]
    for job in jobs:
        job.prefilled = lambda job=job: setattr(job, "first", clock.now)  # type: ignore[misc]
        clock.at(job.request.arrival, lambda job=job: worker.submit(job))  # type: ignore[misc]
    clock.run()
    assert worker.worked == pytest.approx(6000)
    return statistics.fmean(job.first - job.request.arrival - 1.0 for job in jobs)


def test_a_decode_batch_takes_the_steps_that_the_prices_say() -> None:
    prices = replace(PLAIN, token=0.0, context=0.001)
    clock = Clock()
    source, worker = PrefillWorker(clock, prices, Cache(0)), DecodeWorker(clock, prices, 10_000, Cache(0))
    jobs = [Job(Request(0.0, 100, 50)), Job(Request(0.0, 200, 100))]
    for job in jobs:
        worker.submit(job, source)
    clock.run()
    # Pulls of 1 s and 2 s, one after the other; then the steps of one, of both, and of the second alone.
    assert jobs[0].first == pytest.approx(1.0 + prices.step(1, 100))
    assert jobs[1].first == pytest.approx(3.0 + prices.step(2, 302), rel=0.01)
    exact, context, done = 1.0, 100.0, 0
    while done < 50:
        batch = 2 if exact >= 3.0 else 1
        if batch == 2 and context < 200:
            context += 200
        exact += prices.step(batch, context)
        context += batch
        done += 1
    assert jobs[0].finish == pytest.approx(exact, rel=0.05)
    assert jobs[1].finish > jobs[0].finish


def test_kv_room_is_never_exceeded_and_what_never_fits_is_refused() -> None:
    clock = Clock()
    source, worker = PrefillWorker(clock, PLAIN, Cache(0)), DecodeWorker(clock, PLAIN, 250, Cache(0))
    ended: list[str] = []
    for name, size in (("a", 100), ("b", 100), ("too large", 300), ("c", 100)):
        job = Job(Request(0.0, size, 10))
        job.finished = lambda name=name: ended.append(name)  # type: ignore[misc]
        worker.submit(job, source)
        assert worker.reserved <= 250
    assert ended == ["too large"]
    clock.run()
    assert ended == ["too large", "a", "b", "c"]
    assert worker.reserved == 0


def test_a_prompt_computed_beside_a_batch_holds_it_up_and_is_computed_in_chunks() -> None:
    prices = replace(PLAIN, token=0.001, weights=0.01)
    alone, beside = (_finish_of_a_stream(prices, whole) for whole in ((), (5000, 1000)))
    assert beside == pytest.approx(alone + 5.488, abs=0.06), "512 tokens of the second prompt are there from the first"


def _finish_of_a_stream(prices: Prices, whole: Sequence[int]) -> float:
    clock = Clock()
    source, worker = PrefillWorker(clock, prices, Cache(0)), DecodeWorker(clock, prices, 100_000, Cache(8))
    stream = Job(Request(0.0, 100, 2000))
    worker.submit(stream, source)
    prompts = [Job(Request(2.0, size, 3, (1,))) for size in whole]
    for job in prompts:
        clock.at(2.0, lambda job=job: worker.submit(job, None))  # type: ignore[misc]
    clock.run()
    assert [job.hit for job in prompts] == [0, 512][: len(prompts)]
    assert all(job.first < job.finish < math.inf for job in prompts)
    return stream.finish


@settings(max_examples=30)
@given(
    rule=st.sampled_from(sorted(RULES)),
    conditional=st.booleans(),
    routers=st.integers(1, 3),
    exchange=st.sampled_from([None, 0.2, 5.0]),
    index=st.sampled_from(get_args(Kind)),
    seed=st.integers(0, 3),
)
def test_every_request_ends_once_whatever_the_rule_and_the_same_seed_gives_the_same(
    rule: str, conditional: bool, routers: int, exchange: float | None, index: Kind, seed: int
) -> None:
    trace = conversations(60, seed)
    how = {"rule": rule, "conditional": conditional, "routers": routers, "exchange": exchange, "index": index}
    setup = replace(SETUP, seed=seed, **how)  # type: ignore[arg-type]
    jobs = simulate(trace, setup)
    for job in jobs:
        assert job.request.arrival < job.first <= job.finish + 1e-6
        assert job.finish < math.inf
        assert 0 <= job.hit < job.request.prompt
    again = simulate(trace, setup)
    assert [(job.first, job.finish, job.hit) for job in jobs] == [(job.first, job.finish, job.hit) for job in again]


def test_routers_that_hear_of_each_other_queue_less() -> None:
    waits: dict[float | None, float] = dict.fromkeys((None, 0.1), 0.0)
    for seed in range(6):
        trace = poisson(600, 3.0, seed, prompt=4096)
        for exchange in waits:
            setup = replace(SETUP, routers=4, exchange=exchange, seed=seed)
            waits[exchange] += statistics.fmean(job.first - job.request.arrival for job in simulate(trace, setup))
    assert waits[0.1] < waits[None]


def test_rules_differ_where_they_must() -> None:
    trace = conversations(400, 1, rate=9.0)
    found = {rule: scores.score(simulate(trace, replace(SETUP, rule=rule)), 1.0, 0.1) for rule in RULES}
    assert found["price"].hit > found["random"].hit + 0.05
    assert found["price"].ttft_mean < 0.8 * found["random"].ttft_mean
    assert max(found.values(), key=lambda one: one.attainment).attainment - found["price"].attainment < 0.05


def seen(*candidates: Candidate, uncached: Sequence[float] = (0.0, 0.0)) -> Seen:
    return Seen(Ask(1000, 10), candidates, uncached, PLAIN, turn=0, rng=rng())


def test_a_router_estimates_a_worker_that_contradicts_its_events() -> None:
    events = Events("exact", Clock(), rng())
    tell, ours, sibling = events.listener("p0"), View(events), View(events)
    assert tell is not None
    tell([1, 2], True)
    both, doubted = (2 * traces.BLOCK_TOKENS, 2 * traces.BLOCK_TOKENS), int(2 * traces.BLOCK_TOKENS * 0.05)
    assert ours.cached([1, 2, 3], ["p0", "p1"]) == {"p0": both}
    sure = ours.sent("p0", [1, 2])
    assert sure == 2 * traces.BLOCK_TOKENS
    assert ours.sent("p1", [7, 8]) == 0
    assert ours.sent("p1", [7, 8]) is None, "what is only expected foretells nothing"
    for _ in range(30):
        ours.reported("p0", sure, sure, 0)
    assert ours.cached([1, 2, 3], ["p0"]) == {"p0": (doubted, doubted)}, "no trust ends altogether"
    assert sibling.cached([1, 2, 3], ["p0"]) == {"p0": both}, "each judges by what it sent"
    ours.reported("p1", 0, None, 0)
    assert Events("approximate", Clock(), rng()).listener("p0") is None


def test_what_a_slower_tier_holds_is_known_apart_and_foretells_nothing() -> None:
    events = Events("exact", Clock(), rng())
    device, slow, ours = events.listener("p0"), events.listener("p0", "CPU"), View(events)
    assert device is not None
    assert slow is not None
    device([1, 2], True)
    slow([1, 2, 3], True)
    assert ours.cached([1, 2, 3], ["p0"]) == {"p0": (2 * traces.BLOCK_TOKENS, 3 * traces.BLOCK_TOKENS)}
    assert ours.sent("p0", [1, 2, 3]) is None, "what a tier has may be loaded or not"


def test_published_rules_give_a_prefix_up_when_it_costs_too_much() -> None:
    holder = Candidate(requests=100, cached=900)
    assert RULES["sglang"](seen(structs.replace(holder, requests=60), Candidate())) == 0
    assert RULES["sglang"](seen(holder, Candidate())) == 1
    assert RULES["llm-d affinity"](seen(holder, Candidate(), uncached=(17.0, 0.0))) == 0
    assert RULES["llm-d affinity"](seen(holder, Candidate(), uncached=(19.0, 0.0))) == 1


@given(st.lists(st.lists(st.integers(0, 20), unique=True, max_size=6), max_size=30), st.integers(0, 8))
def test_a_cache_holds_what_was_used_last_and_tells_of_every_change(uses: list[list[int]], capacity: int) -> None:
    held: set[int] = set()
    cache = Cache(capacity, lambda blocks, came: held.update(blocks) if came else held.difference_update(blocks))
    for blocks in uses:
        cache.use(blocks)
        assert len(cache) == len(held) <= capacity
        assert cache.leading(blocks) == min(len(blocks), capacity)


MOONCAKE = '{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 8]}'


def test_traces_are_read_and_begin_at_zero() -> None:
    lines = [MOONCAKE, "", MOONCAKE.replace("3000", "1000").replace("1100", "512")]
    found = traces.read_mooncake(lines, "t")
    assert found == (Request(0.0, 512, 5, (0,)), Request(2.0, 1100, 5, (0, 7)))
    azure = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808,10",
             "2023-11-16 18:17:04.4799600,31,0"]  # fmt: skip
    assert traces.read_azure(azure, "t") == (Request(0.0, 4808, 10), Request(0.5, 31, 1))
    assert traces.read_mooncake([], "t") == ()


def test_a_line_that_cannot_be_read_is_named() -> None:
    with pytest.raises(InvalidValue, match=r"conv\.jsonl, line 2: KeyError"):
        traces.read_mooncake([MOONCAKE, "{}"], "conv.jsonl")
    with pytest.raises(InvalidValue, match=r"a\.csv, line 2"):
        traces.read_azure(["TIMESTAMP,ContextTokens,GeneratedTokens", "yesterday,1,2"], "a.csv")


def test_the_format_follows_from_the_first_line_and_bad_lines_are_left_out_by_number() -> None:
    found, problems = traces.read(["", MOONCAKE, "{}", "no JSON", MOONCAKE.replace("3000", "4000")])
    assert [request.arrival for request in found] == [0.0, 1.0]
    assert [problem.line for problem in problems] == [3 - 1, 4 - 1]
    azure = ["TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 18:17:03.9,4808,10\n", "x,1,2\n", "\n"]
    found, problems = traces.read(azure)
    assert found == (Request(0.0, 4808, 10),)
    assert [problem.line for problem in problems] == [3, 4]
    assert str(problems[0]).startswith("line 3: ValueError")
    logged = ['{"time": 5, "prompt_tokens": 7, "events": 4}', "", '{"time": 6, "prompt_tokens": 8, "output_tokens": 0}']
    assert traces.read(logged) == ((Request(0.0, 7, 3), Request(1.0, 8, 1)), ())
    assert traces.read([]) == ((), ())


BURSTGPT = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
            "5,ChatGPT,472,18,490,Conversation log",
            "45,ChatGPT,1087,230,1317,Conversation log", "46,GPT-4,12,0,12,API log"]  # fmt: skip


def test_burstgpts_rows_are_read_and_those_that_failed_are_named() -> None:
    found, problems = traces.read(BURSTGPT)
    assert found == (Request(0.0, 472, 18), Request(40.0, 1087, 230))
    assert [str(problem) for problem in problems] == ["line 4: ValueError: a request without tokens: it failed"]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_saved_benchmark_of_vllm_is_read(indent: int | None) -> None:
    saved = {"date": "x", "start_times": [7.5, 7.0, 8.0], "input_lens": [10, 20, 30], "output_lens": [3, 4, 0]}
    found, problems = traces.read(json.dumps(saved, indent=indent).splitlines(keepends=True))
    assert found == (Request(0.0, 20, 4), Request(0.5, 10, 3))
    assert [str(problem) for problem in problems] == ["line 3: a request without an answer: it failed"]


@pytest.mark.parametrize(
    "text", ['{"start_times": [1.0]}', '{"start_times": 1, "input_lens": 2, "output_lens": 3}', "{\n}"]
)
def test_a_saved_benchmark_without_its_requests_is_a_problem(text: str) -> None:
    found, (problem,) = traces.read(text.splitlines(keepends=True))
    assert found == ()
    assert problem.line == 1


def test_what_is_written_is_read_again() -> None:
    trace = [replace(request, arrival=round(request.arrival, 6)) for request in conversations(50, 2)]
    trace = [replace(request, arrival=request.arrival - trace[0].arrival) for request in trace]
    found, problems = traces.read(traces.line_of(request, number) for number, request in enumerate(trace))
    assert not problems
    assert [(r.prompt, r.output, r.blocks) for r in found] == [(r.prompt, r.output, r.blocks) for r in trace]
    assert [r.arrival for r in found] == pytest.approx([r.arrival for r in trace], abs=1e-5)


@pytest.mark.parametrize("use", [0.3, 0.7])
def test_exponential_prompts_wait_as_long_as_m_m_1_says_and_little_holds(use: float) -> None:
    dice, clock, moment = rng(5), Clock(), 0.0
    worker = PrefillWorker(clock, PLAIN, Cache(0))
    waits: list[float] = []
    flying, area, last = 0, 0.0, 0.0

    def count(change: int) -> None:
        nonlocal flying, area, last
        area += flying * (clock.now - last)
        flying, last = flying + change, clock.now

    for _ in range(60_000):
        moment += dice.expovariate(use / 1000)
        size = 1 + round(dice.expovariate(1 / 1000))
        job = Job(Request(moment, size, 1))

        def prefilled(job: Job = job) -> None:
            waits.append(clock.now - job.request.arrival - job.request.prompt)
            count(-1)

        def arrive(job: Job = job) -> None:
            count(1)
            worker.submit(job)

        job.prefilled = prefilled
        clock.at(moment, arrive)
    clock.run()
    assert statistics.fmean(waits) == pytest.approx(mean_wait(1, use / 1000, 1000), rel=0.08)
    sojourn = statistics.fmean(waits) + 1000
    assert area / clock.now == pytest.approx(len(waits) / clock.now * sojourn, rel=0.01)


def test_what_if_runs_say_what_a_rate_a_rule_and_numbers_of_groups_give() -> None:
    trace, told = conversations(300, 3), list[int]()
    base = Setup(ASSUMED, 1, 1, 100_000, 200_000, decode_prices=ASSUMED.scaled(2.0), life=Life(gpus=(2, 1)))
    one = run(trace, base, Variant(1.0, "price", 2, 1), Promise(5.0, 0.05), told.append)
    assert told == [0, 200]
    assert one.gpu_hours == pytest.approx(5 * max(r.arrival for r in trace) / 3600, rel=0.2)
    fast = run(trace, base, Variant(50.0, "price", 2, 1), Promise(5.0, 0.05))
    assert fast.score.attainment < one.score.attainment
    work = demand(trace, ASSUMED, 100_000)
    assert work.rate == pytest.approx(4.0, rel=0.2)
    assert 0 < work.prefill < ASSUMED.prefill(work.prompt, 0), "some of it is cached"
    found = planned(work, ASSUMED, Promise(5.0, 0.05), Group(200_000), Limits((1, 9), (1, 9)))
    assert found.enough
    lone = demand(trace[:1], ASSUMED, 100_000)
    assert (lone.arrival_variation, lone.prefill_variation) == (1.0, 0.0)


def test_samples_keep_the_rate_and_differ() -> None:
    trace = conversations(2000, 5)
    first, second = (traces.sample(trace, 0.5, 2.0, rng(seed)) for seed in (1, 2))
    assert first != second
    for found in (first, second):
        assert len(found) / found[-1].arrival == pytest.approx(8.0, rel=0.1)
    assert len(traces.sample(trace, 1.0, 1.0, rng())) == 2000


def test_scores() -> None:
    jobs = [
        Job(Request(0, 1000, 11), hit=500, first=1.0, finish=2.0),
        Job(Request(0, 1000, 1), first=3.0, finish=3.0),
        Job(Request(0, 1000, 11)),
    ]
    found = scores.score(jobs, ttft=2.0, itl=0.2)
    assert found.attainment == pytest.approx(1 / 3)
    assert found.hit == pytest.approx(1 / 6)
    assert (found.ttft_p99, found.itl_p99) == (math.inf, math.inf)
    assert scores.quantile([1, 2, 3, 4], 0.5) == 2
    assert scores.interval([1.0]) == (1.0, 0.0)
    assert scores.interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / math.sqrt(3)), rel=1e-3)
    repeated = [Request(0, 1024, 1, (1, 2)), Request(1, 1024, 1, (1, 2))]
    assert scores.pooled_hit(repeated, 10_000) == 0.5


@pytest.mark.parametrize("limit", [0.002, 0.3, 1.0, 7.0, 900.0])
def test_the_greatest_rate_is_found_from_both_sides(limit: float) -> None:
    assert limit / 1.02 <= greatest(lambda factor: factor <= limit) <= limit


def test_a_search_for_the_greatest_rate_ends_where_there_is_none() -> None:
    assert greatest(lambda _: False) == 0.0
    assert greatest(lambda _: True) >= 1024


def test_a_pool_serves_its_greatest_rate_within_objectives_and_little_more_not() -> None:
    setup, promise = replace(SETUP, prefill=1, decode=1), Promise(2.0, 0.05)
    trace = [replace(request, prompt=4000, output=20) for request in poisson(400, 1.0, 3)]

    def kept(rate: float) -> float:
        return run(trace, setup, Variant(rate, "price", 1, 1), promise).score.attainment

    most = greatest_rate(trace, setup, promise)
    assert 1 < most < 1 / ASSUMED.prefill(4000, 0)
    assert kept(most) >= 0.99 > kept(1.05 * most)


@pytest.mark.parametrize(("both", "seconds"), [(False, 10.0), (True, 20.0)])
def test_pulls_from_two_prefill_workers_share_the_link_of_one_decode_worker_where_it_has_one(
    both: bool, seconds: float
) -> None:
    prices = Prices(0.0, 0.0, 0.0, 1e-9, 0.0, 0.0, pull_token=0.01)
    trace = [Request(0.0, 1000, 1), Request(0.0, 1000, 1)]
    setup = Setup(prices, 2, 1, 0, 10_000, rule="least-load", both_links=both)
    assert max(job.finish for job in simulate(trace, setup)) == pytest.approx(seconds, rel=1e-3)


def test_a_whole_prompt_that_comes_during_a_step_is_read_from_the_next_one_on() -> None:
    clock = Clock()
    worker = DecodeWorker(clock, Prices(1.0, 0.0, 0.0, 1e-9, 0.0, 0.0, 0.0), 10_000, Cache(0))
    first, second = Job(Request(0.0, 10, 20)), Job(Request(1.25, 10, 2))
    for job in (first, second):
        clock.at(job.request.arrival, lambda job=job: worker.submit(job, None))  # type: ignore[misc]
    clock.run()
    assert (first.first, second.first) == (pytest.approx(1.0), pytest.approx(3.0))
