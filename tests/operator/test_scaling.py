"""Both numbers at once: against exhaustive search, closed forms, and what must never happen."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.economics import prices_of
from twinpool.core.kv import SHAPES
from twinpool.core.timing import ACCELERATORS, Link
from twinpool.operator.logic.scaling import Limits, Pair, cheapest, plan_scale
from twinpool.operator.logic.scaling_need import Demand, Group, Promise, largest_batch, need
from twinpool.simulate.pool import Setup, simulate
from twinpool.simulate.scores import score
from twinpool.simulate.traces import Request

PRICES = prices_of(SHAPES["llama-3-70b"], ACCELERATORS["h100"], 8)
PROMISE = Promise(ttft=2.0, itl=0.05)
GROUP = Group(kv_tokens=1_000_000)
WIDE = Limits((1, 1000), (1, 1000))


def demand(rate: float = 4.0, prompt: int = 4000, output: int = 300) -> Demand:
    return Demand(rate, PRICES.prefill(prompt, 0), prompt, output, PRICES.prefill(prompt, 0))


bands = st.none() | st.sampled_from([(Fraction(1, 4), Fraction(1)), (Fraction(1, 2), Fraction(1, 2))])
limits = st.builds(
    lambda plow, pmore, dlow, dmore, pg, dg, budget, band: Limits(
        (plow, plow + pmore), (dlow, dlow + dmore), pg, dg, budget, band
    ),
    st.integers(0, 4), st.integers(0, 8), st.integers(0, 4), st.integers(0, 8),
    st.integers(1, 4), st.integers(1, 4), st.none() | st.integers(0, 60), bands,
)  # fmt: skip
floor = st.integers(0, 14)


def allowed(bounds: Limits) -> list[Pair]:
    found = []
    for prefill in range(bounds.prefill[0], bounds.prefill[1] + 1):
        for decode in range(bounds.decode[0], bounds.decode[1] + 1):
            gpus = prefill * bounds.prefill_gpus + decode * bounds.decode_gpus
            in_band = bounds.band is None or bounds.band[0] * decode <= prefill <= bounds.band[1] * decode
            if in_band and (bounds.budget is None or gpus <= bounds.budget):
                found.append((prefill, decode))
    return found


@given(limits, floor, floor)
def test_the_pair_is_the_one_that_exhaustive_search_finds(bounds: Limits, prefill: int, decode: int) -> None:
    def worth(pair: Pair) -> tuple[float, int]:
        shares = [have / least for have, least in zip(pair, (prefill, decode), strict=True) if least]
        gpus = pair[0] * bounds.prefill_gpus + pair[1] * bounds.decode_gpus
        return -min([1.0, *shares]), gpus

    chosen = cheapest((prefill, decode), bounds)
    every = allowed(bounds) or allowed(replace(bounds, band=None))
    if every:
        assert chosen in every
        best = min(map(worth, every))
        assert worth(chosen)[0] == pytest.approx(best[0])
        assert worth(chosen)[1] <= best[1]
    else:
        assert chosen == (bounds.prefill[0], bounds.decode[0])


@given(rate=st.floats(0.01, 60), more=st.floats(1.0, 3.0), prompt=st.integers(50, 30_000), output=st.integers(1, 2000))
def test_more_work_never_needs_fewer_groups(rate: float, more: float, prompt: int, output: int) -> None:
    one, other = (need(demand(r, prompt, output), PRICES, PROMISE, GROUP) for r in (rate, rate * more))
    assert one.prefill <= other.prefill
    assert one.decode <= other.decode
    if math.isfinite(one.prefill):
        assert one.prefill >= rate * demand(rate, prompt).prefill, "never above capacity"


def test_a_backlog_and_bursts_need_more() -> None:
    calm = need(demand(), PRICES, PROMISE, GROUP)
    behind = need(replace(demand(), backlog=300.0), PRICES, PROMISE, GROUP)
    bursty = need(replace(demand(), arrival_variation=9.0, prefill_variation=3.0), PRICES, PROMISE, GROUP)
    assert behind.prefill >= calm.prefill + 4
    assert bursty.prefill > calm.prefill
    assert bursty.decode >= calm.decode
    idle = need(Demand(0.0, 0.0, 0, 0.0, 0.0, backlog=90.0), PRICES, PROMISE, replace(GROUP, sequences=0))
    assert (idle.prefill, idle.decode) == (2, 0)


def test_a_batch_is_bound_by_tokens_in_time_by_room_and_by_sequences() -> None:
    asked = demand()
    assert largest_batch(asked, PRICES, 10.0, replace(GROUP, sequences=40)) == 40
    assert largest_batch(asked, PRICES, 10.0, Group(kv_tokens=43_500)) == 10
    batch = largest_batch(asked, PRICES, 0.03, Group(kv_tokens=10_000_000, sequences=1000))
    context = asked.prompt + asked.output / 2
    assert PRICES.step(batch, batch * context) <= 0.03 < PRICES.step(batch + 1, (batch + 1) * context)


def test_a_full_link_needs_more_groups_on_both_sides() -> None:
    slow = prices_of(SHAPES["llama-3-70b"], ACCELERATORS["h100"], 8, Link(bandwidth=3e9))
    found, usual = (need(demand(), prices, PROMISE, GROUP) for prices in (slow, PRICES))
    use = 4.0 * slow.pull(4000)
    assert found.prefill > usual.prefill
    assert found.decode == math.ceil(use / 0.7)
    # Between 0.6 and 0.7 it is only said.
    near = demand(rate=0.65 / slow.pull(4000))
    decision = plan_scale(near, slow, PROMISE, GROUP, WIDE, (1, 1))
    assert decision.decode == 1
    assert decision.reason.endswith("; the links of 1 decode groups are 65% full, so pulls wait")
    assert "links" not in plan_scale(demand(rate=0.5 / slow.pull(4000)), slow, PROMISE, GROUP, WIDE, (1, 1)).reason
    assert "links" not in plan_scale(near, slow, PROMISE, GROUP, Limits((0, 9), (0, 0)), (1, 0)).reason


@pytest.mark.parametrize(
    ("promise", "words"),
    [(Promise(0.01, 0.05), "one prefill alone"), (Promise(2.0, 0.0001), "one sequence alone")],
)
def test_a_promise_that_no_number_keeps_is_said(promise: Promise, words: str) -> None:
    decision = plan_scale(demand(), PRICES, promise, GROUP, Limits((1, 8), (1, 8)), (2, 2))
    assert words in decision.reason
    assert not decision.enough
    assert (decision.prefill, decision.decode) in {(2, 1), (2, 2), (1, 2)}, "neither fewer nor more would help"


def test_without_figures_nothing_changes() -> None:
    decision = plan_scale(None, PRICES, PROMISE, GROUP, WIDE, (3, 5))
    assert (decision.prefill, decision.decode) == (3, 5)
    assert "no current figures" in decision.reason


def test_what_the_limits_forbid_is_said_with_the_need() -> None:
    decision = plan_scale(demand(40.0), PRICES, PROMISE, GROUP, Limits((1, 4), (1, 4)), (1, 1))
    assert not decision.enough
    assert "raise the most groups" in decision.reason
    assert decision.prefill == 4
    within = plan_scale(demand(), PRICES, PROMISE, GROUP, WIDE, (1, 1))
    assert within.enough
    assert within.need is not None
    assert (within.prefill, within.decode) == (within.need.prefill, within.need.decode)
    assert plan_scale(demand(), PRICES, PROMISE, GROUP, WIDE, (1, 1), growth=3.0).prefill > within.prefill


def test_a_need_that_has_not_lasted_yet_is_no_matter_of_the_limits() -> None:
    asked = demand(40.0)
    held = plan_scale(asked, PRICES, PROMISE, GROUP, WIDE, (1, 1), steady=[(1.0, 1.0)])
    assert (held.prefill, held.decode) == (1, 1)
    assert held.enough
    assert "not more than 1 and 1 for as long as scaleOut yet" in held.reason
    tight = plan_scale(asked, PRICES, PROMISE, GROUP, Limits((1, 2), (1, 2)), (1, 1), steady=[(1.0, 1.0)])
    assert not tight.enough


def test_scaling_in_waits_for_the_last_need_and_never_oscillates_under_noise() -> None:
    settled = plan_scale(demand(), PRICES, PROMISE, GROUP, WIDE, (1, 1))
    pair = (settled.prefill, settled.decode)
    high = (pair[0] + 5, pair[1] + 3)
    held = plan_scale(demand(), PRICES, PROMISE, GROUP, WIDE, high, recent=[high])
    assert (held.prefill, held.decode) == high
    dice, moves = random.Random(1), 0
    for _ in range(100):
        decision = plan_scale(demand(4.0 * dice.uniform(0.97, 1.03)), PRICES, PROMISE, GROUP, WIDE, pair)
        moves += (decision.prefill, decision.decode) != pair
        pair = (decision.prefill, decision.decode)
    assert moves <= 2


def test_longer_prompts_at_the_same_rate_move_the_ratio_to_prefill_and_longer_answers_to_decode() -> None:
    # A link for each GPU, so that links are not what is short.
    wired = prices_of(SHAPES["llama-3-70b"], ACCELERATORS["h100"], 8, Link(bandwidth=400e9, per_descriptor=0.0))

    def ratio(prompt: int, output: int) -> float:
        decision = plan_scale(demand(30.0, prompt, output), wired, PROMISE, GROUP, WIDE, (1, 1))
        return decision.prefill / decision.decode

    assert ratio(12_000, 300) > ratio(4000, 300) > ratio(4000, 1500)


@pytest.mark.parametrize(
    ("rate", "prompt", "output", "ttft"), [(6.0, 3000, 200, 3.0), (3.0, 8000, 400, 8.0), (10.0, 1500, 100, 2.0)]
)
def test_a_pool_of_the_planned_size_keeps_the_promise_in_simulation(
    rate: float, prompt: int, output: int, ttft: float
) -> None:
    dice, moment, trace = random.Random(7), 0.0, []
    for _ in range(1500):
        moment += dice.expovariate(rate)
        trace.append(
            Request(moment, max(100, int(dice.expovariate(1 / prompt))), max(1, int(dice.expovariate(1 / output))))
        )
    works = [SLOW.prefill(request.prompt, 0) for request in trace]
    mean = sum(works) / len(works)
    variation = sum((work - mean) ** 2 for work in works) / len(works) / mean**2
    asked = Demand(rate, mean, prompt, output, sorted(works)[int(0.9 * len(works))], prefill_variation=variation)
    decision = plan_scale(asked, SLOW, Promise(ttft, 0.05), GROUP, WIDE, (1, 1))

    def attained(prefill: int, decode: int) -> float:
        jobs = simulate(trace, Setup(SLOW, prefill, decode, 0, GROUP.kv_tokens))
        return score(jobs, ttft, 0.05).attainment

    assert attained(decision.prefill, decision.decode) >= 0.97
    assert attained(max(1, decision.prefill // 2), decision.decode) < 0.97 or decision.prefill == 1


SLOW = prices_of(SHAPES["llama-3-70b"], ACCELERATORS["a100"], 8)
