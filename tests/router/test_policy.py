"""Choices by each policy, and the price of work: what is chosen, and that nothing better was passed over."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.economics import ASSUMED
from twinpool.router.logic import policy, price
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.policy import Ask, Candidate

candidates = st.lists(
    st.builds(
        lambda requests, tokens, backlog, held, on_device: Candidate(
            requests, tokens, backlog, cached=held * on_device // 100, held=held, capacity=50_000
        ),
        requests=st.integers(0, 60),
        tokens=st.integers(0, 100_000),
        backlog=st.floats(0, 60),
        held=st.integers(0, 999),
        on_device=st.integers(0, 100),
    ),
    min_size=1,
    max_size=12,
)
ASK = Ask(1000, 200)


def rng() -> random.Random:
    return random.Random(0)


def test_round_robin_is_fair_and_does_not_walk_in_step() -> None:
    pairs = {(turn % 2, policy.round_robin(2, turn)) for turn in range(40)}
    assert len(pairs) == 4
    assert sum(policy.round_robin(2, turn) for turn in range(40)) == 20


def test_equals_are_told_apart_at_random_also_within_five_percent() -> None:
    dice = rng()
    assert {policy.least([1.04, 1.0, 1.06], dice) for _ in range(50)} == {0, 1}
    assert policy.least([1.0, 2.0], dice) == 0
    assert {policy.least_load([5, 7, 5], dice) for _ in range(50)} == {0, 2}
    assert policy.least_load([9, 7], dice) == 1


def test_the_longest_prefix_wins_and_then_the_least_load() -> None:
    workers = [Candidate(tokens=9, held=10), Candidate(tokens=5, held=10), Candidate(held=3)]
    assert policy.longest_prefix(workers, rng()) == 1


def test_of_many_the_best_holders_and_some_others_are_priced() -> None:
    assert policy.shortlist(16, iter(()), rng()) == range(16)
    dice, seen = rng(), set()
    for _ in range(100):
        chosen = policy.shortlist(100, range(99, -1, -1), dice)
        assert set(range(92, 100)) <= set(chosen)
        assert len(chosen) == len(set(chosen)) <= 16
        seen |= set(chosen)
    assert len(seen) > 90


def test_preferred() -> None:
    workers = [Endpoint(name, "decode", "h", 1) for name in "ab"]
    assert [e.id for e in policy.preferred(workers, {"a"})] == ["b"]
    assert policy.preferred(workers, {"a", "b"}) is workers


@given(candidates)
def test_no_prefill_worker_was_cheaper_by_more_than_the_tie(workers: list[Candidate]) -> None:
    choice = price.cheapest_prefill(ASK, workers, ASSUMED, rng())
    costs = price.prefill_prices(ASK, workers, ASSUMED)
    assert costs[choice.place] == choice.price <= 1.05 * min(costs)
    chosen = workers[choice.place]
    assert chosen.backlog <= choice.ttft <= choice.price


@given(candidates, st.integers(0, 11), st.floats(0.01, 10))
def test_more_backlog_and_less_cache_never_lower_a_price(workers: list[Candidate], place: int, more: float) -> None:
    place %= len(workers)
    before = price.prefill_prices(ASK, workers, ASSUMED)
    one = workers[place]
    worse = Candidate(one.requests, one.tokens, one.backlog + more, one.cached // 2, one.held // 2)
    after = price.prefill_prices(ASK, [*workers[:place], worse, *workers[place + 1 :]], ASSUMED)
    assert after[place] > before[place]
    assert after[:place] + after[place + 1 :] == before[:place] + before[place + 1 :]


@given(candidates, st.floats(0, 30))
def test_with_an_objective_the_choice_is_the_cheapest_by_what_is_still_worth_waiting_for(
    workers: list[Candidate], ttft: float
) -> None:
    choice = price.cheapest_prefill(ASK, workers, ASSUMED, rng(), ttft)
    costs = price.prefill_prices(ASK, workers, ASSUMED)
    less = price.lateness(ASK, workers, ASSUMED, ttft)
    judged = [cost - late for cost, late in zip(costs, less, strict=True)]
    assert all(0 <= late <= one.backlog for late, one in zip(less, workers, strict=True))
    assert judged[choice.place] <= 1.05 * min(judged)
    assert choice.price == costs[choice.place]
    in_time = [one for one in workers if one.backlog + ASSUMED.prefill(ASK.prompt, 0) + ASSUMED.pull(ASK.prompt) < ttft]
    if len(in_time) == len(workers):
        assert choice == price.cheapest_prefill(ASK, workers, ASSUMED, rng()), "nobody is late: nothing changes"


@given(candidates, st.integers(0, 11), st.floats(0.01, 10), st.floats(0, 30))
def test_lateness_never_makes_a_longer_queue_the_better_one(
    workers: list[Candidate], place: int, more: float, ttft: float
) -> None:
    place %= len(workers)
    one = workers[place]

    def judged(worker: Candidate) -> float:
        there = [*workers[:place], worker, *workers[place + 1 :]]
        cost = price.prefill_prices(ASK, there, ASSUMED)[place]
        return cost - price.lateness(ASK, there, ASSUMED, ttft)[place]

    worse = Candidate(one.requests, one.tokens, one.backlog + more, one.cached // 2, one.held // 2)
    assert judged(worse) > judged(one)


def test_who_is_late_anyway_goes_where_it_costs_others_least() -> None:
    ask = Ask(8000, 100)
    free, holder = Candidate(backlog=11.0), Candidate(cached=7000, held=7000, backlog=12.0)
    assert price.cheapest_prefill(ask, [free, holder], ASSUMED, rng()).place == 0
    assert price.cheapest_prefill(ask, [free, holder], ASSUMED, rng(), ttft=20.0).place == 0
    assert price.cheapest_prefill(ask, [free, holder], ASSUMED, rng(), ttft=0.5).place == 1


def test_a_cached_prefix_is_worth_a_queue_only_as_long_as_what_it_saves() -> None:
    ask = Ask(8000, 100)
    saved = ASSUMED.prefill(8000, 0) - ASSUMED.prefill(1000, 7000)
    short, long = 0.8 * saved, 1.2 * saved
    holder = Candidate(cached=7000, held=7000, backlog=short)
    assert price.cheapest_prefill(ask, [Candidate(), holder], ASSUMED, rng()).place == 1
    holder = Candidate(cached=7000, held=7000, backlog=long)
    assert price.cheapest_prefill(ask, [Candidate(), holder], ASSUMED, rng()).place == 0
    # The longer the queues, the more others wait for the same seconds, and the more a saved one is worth.
    busy = [Candidate(requests=9, backlog=5.0), Candidate(requests=9, cached=7000, held=7000, backlog=5.0 + long)]
    assert price.cheapest_prefill(ask, busy, ASSUMED, rng()).place == 1


def test_a_decode_worker_without_room_for_the_kv_costs_a_wait() -> None:
    full = Candidate(requests=10, tokens=49_000, capacity=50_000)
    roomy = Candidate(requests=10, tokens=49_000, capacity=100_000)
    unknown = Candidate(requests=10, tokens=49_000)
    waiting, free, assumed = (price.decode_price(ASK, one, ASSUMED) for one in (full, roomy, unknown))
    assert waiting > free == assumed
    assert price.cheapest_decode(ASK, [full, roomy], ASSUMED, rng()).place == 1
    assert price.decode_price(Ask(90_000, 10), Candidate(capacity=50_000), ASSUMED) > 0, "an idle one has no queue"


def test_a_decode_worker_that_holds_the_prompt_needs_no_pull() -> None:
    ask = Ask(8000, 1)
    choice = price.cheapest_decode(ask, [Candidate(), Candidate(cached=7999, held=7999)], ASSUMED, rng())
    assert choice.place == 1
    assert choice.ttft < ASSUMED.pull(8000)


def test_an_idle_decode_worker_prefills_when_the_prefill_worker_is_behind() -> None:
    behind, idle = [Candidate(requests=9, backlog=20.0)], [Candidate()]
    decision = price.decide(ASK, behind, idle, ASSUMED, rng())
    assert decision.prefill is None
    assert decision.saved > 19


def test_a_busy_decode_worker_is_not_held_up() -> None:
    running = [Candidate(requests=60, tokens=60_000)]
    decision = price.decide(Ask(8000, 100), [Candidate()], running, ASSUMED, rng())
    assert decision.prefill is not None
    assert decision.prefill.place == 0
    assert decision.saved > 0


def test_what_is_nearly_all_cached_on_decode_stays_there() -> None:
    held = [Candidate(requests=4, tokens=4000, cached=7990, held=7990)]
    assert price.decide(Ask(8000, 100), [Candidate()], held, ASSUMED, rng()).prefill is None


@given(candidates, candidates, st.sampled_from([Ask(10, 1), ASK, Ask(60_000, 2000)]))
def test_a_decision_is_the_cheaper_of_both_ways(prefills: list[Candidate], decodes: list[Candidate], ask: Ask) -> None:
    handed = (
        price.cheapest_prefill(ask, prefills, ASSUMED, rng()).price
        + price.cheapest_decode(ask, decodes, ASSUMED, rng()).price
    )
    whole = price.cheapest_whole(ask, decodes, ASSUMED, rng()).price
    decision = price.decide(ask, prefills, decodes, ASSUMED, rng())
    assert decision.saved == pytest.approx(abs(whole - handed), rel=0.2, abs=0.11 * max(whole, handed))
    assert decision.saved >= 0
