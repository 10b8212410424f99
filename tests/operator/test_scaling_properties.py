"""What holds of every decision on numbers of groups, whatever the work, the limits and the past."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.economics import prices_of
from twinpool.core.kv import SHAPES
from twinpool.core.timing import ACCELERATORS
from twinpool.operator.logic.scaling import Limits, Pair, plan_scale
from twinpool.operator.logic.scaling_need import Demand, Group, Promise

if TYPE_CHECKING:
    from twinpool.operator.logic.scaling import Decision

PRICES = prices_of(SHAPES["llama-3-70b"], ACCELERATORS["h100"], 8)
PROMISE = Promise(ttft=2.0, itl=0.05)
GROUP = Group(kv_tokens=1_000_000)

bands = st.none() | st.sampled_from(
    [(Fraction(1, 4), Fraction(1)), (Fraction(1, 2), Fraction(1, 2)), (Fraction(1), Fraction(3))]
)
limits = st.builds(
    lambda least, more, gpus, budget, band: Limits(
        (least[0], least[0] + more[0]), (least[1], least[1] + more[1]), *gpus, budget, band
    ),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.none() | st.integers(1, 120),
    bands,
)
pairs = st.tuples(st.integers(0, 20), st.integers(0, 20))
needs = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda p: (float(p[0]), float(p[1]))), max_size=4
)
demands = st.builds(
    lambda rate, prompt, output, prefill_variation, arrival_variation, backlog, flying: Demand(
        rate, PRICES.prefill(prompt, 0), prompt, output, 1.5 * PRICES.prefill(prompt, 0),
        prefill_variation, arrival_variation, backlog, flying,
    ),
    st.floats(0.05, 60), st.integers(50, 12_000), st.integers(1, 1500), st.floats(0, 4), st.floats(1, 9),
    st.floats(0, 300), st.floats(0, 600),
)  # fmt: skip


def decide(
    demand: Demand, bounds: Limits, current: Pair, recent: list[tuple[float, float]], steady: list[tuple[float, float]]
) -> Decision:
    return plan_scale(demand, PRICES, PROMISE, GROUP, bounds, current, recent, 1.0, steady)


@given(demands, st.floats(1.0, 3.0), st.floats(0, 200), limits, st.booleans(), pairs, needs, needs)
def test_more_work_never_gets_fewer_groups_of_either_role(
    demand: Demand,
    factor: float,
    backlog: float,
    bounds: Limits,
    wide: bool,
    current: Pair,
    recent: list[tuple[float, float]],
    steady: list[tuple[float, float]],
) -> None:
    """Where the limits allow what the larger need asks for; beyond that the two roles share what there is."""
    if wide:
        bounds = Limits((0, 5000), (0, 5000), bounds.prefill_gpus, bounds.decode_gpus, None, bounds.band)
    less = decide(demand, bounds, current, recent, steady)
    more = decide(replace(demand.times(factor), backlog=demand.backlog + backlog), bounds, current, recent, steady)
    assert less.need is not None
    assert more.need is not None
    assert less.need.prefill <= more.need.prefill
    assert less.need.decode <= more.need.decode
    if more.enough and (wide or _held(more, current)):
        assert less.prefill <= more.prefill
        assert less.decode <= more.decode


def _held(decision: Decision, current: Pair) -> bool:
    """Return whether no limit took a group away that is there."""
    return decision.prefill >= current[0] and decision.decode >= current[1]


def _allowed(pair: Pair, bounds: Limits, *, band: bool = True) -> bool:
    prefill, decode = pair
    within = bounds.prefill[0] <= prefill <= bounds.prefill[1] and bounds.decode[0] <= decode <= bounds.decode[1]
    gpus = prefill * bounds.prefill_gpus + decode * bounds.decode_gpus
    in_band = not band or bounds.band is None or bounds.band[0] * decode <= prefill <= bounds.band[1] * decode
    return within and in_band and (bounds.budget is None or gpus <= bounds.budget)


@given(demands, limits, pairs, needs, needs)
def test_a_decision_is_within_bounds_band_and_budget_whenever_any_pair_is(
    demand: Demand,
    bounds: Limits,
    current: Pair,
    recent: list[tuple[float, float]],
    steady: list[tuple[float, float]],
) -> None:
    decision = decide(demand, bounds, current, recent, steady)
    chosen = decision.prefill, decision.decode
    every = [
        (prefill, decode)
        for prefill in range(bounds.prefill[0], bounds.prefill[1] + 1)
        for decode in range(bounds.decode[0], bounds.decode[1] + 1)
    ]
    if any(_allowed(pair, bounds) for pair in every):
        assert _allowed(chosen, bounds)
    elif any(_allowed(pair, bounds, band=False) for pair in every):
        assert _allowed(chosen, bounds, band=False)
    else:
        assert chosen == (bounds.prefill[0], bounds.decode[0])


@given(demands, st.lists(st.floats(1.0, 1.09), min_size=2, max_size=40), limits)
def test_noise_of_nine_percent_never_takes_a_group_away_again(
    demand: Demand, noise: list[float], bounds: Limits
) -> None:
    """Numbers rise to the greatest need of the noise and stay: a tenth more work must not need a group that goes."""
    demand = replace(demand, backlog=0.0, flying=0.0)
    pair = (bounds.prefill[0], bounds.decode[0])
    found = [pair]
    for factor in noise:
        decision = decide(demand.times(factor), bounds, pair, [], [])
        pair = decision.prefill, decision.decode
        found.append(pair)
        if not decision.enough:
            return
    for before, after in pairwise(found[1:]):
        assert before[0] <= after[0]
        assert before[1] <= after[1]
