"""Which losses are seen, and how many groups they are worth."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.economics import ASSUMED
from twinpool.operator.logic.losses import LEAST, MEMORY, Loss, noticed, spares
from twinpool.operator.logic.scaling import Limits, plan_scale
from twinpool.operator.logic.scaling_need import Demand, Group, Promise

PROMISE, GROUP = Promise(2.0, 0.05), Group(10**9)
DEMAND = Demand(30.0, 0.1, 3000, 200, 0.2)


def test_a_group_that_is_wanted_and_serves_no_more_is_lost_for_a_day() -> None:
    lost = noticed((), (4, 3), (2, 3), (4, 3), 100.0)
    assert lost == (Loss(100.0, 0, 2, 4),)
    assert noticed(lost, (2, 3), (2, 3), (4, 3), 102.0) == lost, "once"
    assert noticed((), (4, 3), (3, 2), (3, 3), 0.0) == (Loss(0.0, 1, 1, 3),), "one was let go"
    assert noticed((), (2, 2), (2, 2), (5, 5), 0.0) == (), "some are starting"
    assert noticed(lost, (2, 3), (2, 3), (2, 3), 101.0 + MEMORY) == ()
    assert len(noticed(lost * 200, (1, 1), (1, 1), (1, 1), 100.0)) == 100


def test_a_spare_group_is_had_when_losses_cost_more_than_may_miss() -> None:
    # Half of four groups for 360 s of six hours: 0.8 % of the requests; for 540 s 1.25 %.
    losses = (Loss(0.0, 0, 2, 4),)
    assert spares(losses, 0.0, 600.0, 360.0, 0.01) == (0, 0)
    assert spares(losses, 0.0, 600.0, 540.0, 0.01) == (1, 0)
    assert spares(losses, 0.0, 2 * LEAST, 540.0, 0.01) == (0, 0), "the rarer they are the less they cost"
    assert spares(losses * 8, 0.0, 10 * LEAST, 600.0, 0.001) == (2, 0)
    assert spares((Loss(0.0, 1, 1, 1),), 0.0, 60.0, 600.0, 0.01) == (0, 1)
    assert spares((), 0.0, 60.0, 600.0, 0.01) == (0, 0)


lost_groups = st.builds(
    lambda role, lost, more: Loss(0.0, role, lost, lost + more),
    st.integers(0, 1), st.integers(1, 5), st.integers(0, 9),
)  # fmt: skip


@given(
    st.lists(lost_groups),
    st.floats(0, 900), st.floats(0.001, 0.1),
)  # fmt: skip
def test_more_losses_or_longer_starts_never_make_fewer(losses: list[Loss], start: float, miss: float) -> None:
    some, all_, slow = (
        spares(losses[:-1], 0.0, 0.0, start, miss),
        spares(losses, 0.0, 0.0, start, miss),
        spares(losses, 0.0, 0.0, 2 * start, miss),
    )
    for few, many in ((some, all_), (all_, slow)):
        assert few[0] <= many[0]
        assert few[1] <= many[1]


def plan(limits: Limits, current: tuple[int, int], spare: tuple[int, int], **more: object) -> tuple[int, int, str]:
    found = plan_scale(DEMAND, ASSUMED, PROMISE, GROUP, limits, current, spare=spare, **more)  # type: ignore[arg-type]
    return found.prefill, found.decode, found.reason


def test_spares_come_on_top_of_the_need_and_go_with_the_losses() -> None:
    wide = Limits((0, 50), (0, 50))
    need = plan(wide, (0, 0), (0, 0))[:2]
    more = plan(wide, need, (1, 1))
    assert more[:2] == (need[0] + 1, need[1] + 1)
    assert more[2].endswith("; 1 prefill and 1 decode more, since groups were lost lately")
    held = [(float(need[0]), float(need[1]))]
    assert plan(wide, more[:2], (1, 1), recent=held)[:2] == more[:2]
    assert plan(wide, more[:2], (1, 1), recent=[*held, more[:2]])[:2] == (more[0], more[1]), "not one more at each look"
    assert plan(wide, more[:2], (0, 0), recent=held)[:2] == need
    nobody = plan_scale(Demand(0.0, 0.0, 0.0, 0.0, 0.0), ASSUMED, PROMISE, GROUP, wide, (0, 0), spare=(1, 1))
    assert (nobody.prefill, nobody.decode) == (0, 0), "who asks for nothing loses nothing"


@pytest.mark.parametrize("limits", [Limits((0, 4), (0, 50)), Limits((0, 50), (0, 50), budget=6)])
def test_a_spare_gives_way_to_limits(limits: Limits) -> None:
    need = plan(limits, (0, 0), (0, 0))
    assert plan(limits, (0, 0), (3, 0)) == need


@given(
    st.tuples(st.integers(0, 6), st.integers(0, 6)), st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.none() | st.integers(2, 14), st.none() | st.just((Fraction(1, 2), Fraction(2))),
)  # fmt: skip
def test_pairs_with_spares_are_within_the_limits(current, spare, budget, band) -> None:  # type: ignore[no-untyped-def]
    prefill, decode, _ = plan(Limits((1, 8), (1, 8), budget=budget, band=band), current, spare)
    assert 1 <= prefill <= 8
    assert 1 <= decode <= 8
    assert budget is None or prefill + decode <= budget
    assert band is None or Fraction(1, 2) <= Fraction(prefill, decode) <= 2


def test_looks_never_order_one_more_each_time() -> None:
    wide = Limits((0, 50), (0, 50))
    for spare in product(range(3), range(3)):
        pair = (3, 3)
        seen = []
        for _ in range(8):
            # As at first, when nobody knows yet what was needed.
            pair = plan(wide, pair, spare, recent=[pair])[:2]
            seen.append(pair)
        assert len(set(seen)) == 1
