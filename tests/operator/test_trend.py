"""How a rate moved over a start, and what of a backlog is left when a group is up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.operator.logic.trend import (
    FARTHEST,
    MEMORY,
    Jump,
    Rate,
    in_flight,
    leapt,
    remembered,
    slope,
    standing,
    step_at,
    surge,
)


def rates(start: float, per_second: float, seconds: float = 600.0) -> tuple[Rate, ...]:
    found: tuple[Rate, ...] = ()
    for at in range(0, int(seconds), 2):
        found = remembered(found, Rate(float(at), start + per_second * at, 60.0), 180.0)
    return found


def test_a_rise_is_extended_and_a_fall_or_a_constant_rate_is_not() -> None:
    found = rates(10.0, 0.02)
    assert slope(found, Rate(600.0, 22.0, 60.0), 180.0) == pytest.approx(0.02, rel=0.05)
    assert slope(rates(20.0, -0.02), Rate(600.0, 8.0, 60.0), 180.0) == 0.0
    assert slope((), Rate(0.0, 8.0, 60.0), 180.0) == 0.0
    assert slope(found, Rate(600.0, 8.0, 0.0), 180.0) == 0.0
    assert slope(found[-2:], Rate(600.0, 99.0, 60.0), 180.0) == 0.0, "too short ago to say anything"


def test_only_as_much_is_remembered_as_a_look_ahead_wants() -> None:
    found = rates(10.0, 0.0, 5000.0)
    assert len(found) <= (180 + 2 * 60) / 10 + 2
    assert len(remembered(found, Rate(1e6, 1.0, 60.0), 1e9)) == 1
    assert FARTHEST < 1e4


def test_chance_is_rarely_taken_for_growth() -> None:
    dice, wrong = random.Random(3), 0
    for _ in range(400):
        first, second = (sum(dice.random() < 0.05 for _ in range(1200)) / 60 for _ in range(2))
        wrong += slope((Rate(0.0, first, 60.0),), Rate(180.0, second, 60.0), 180.0) > 0
    assert wrong < 400 * 0.05


def test_what_jumped_is_no_slope() -> None:
    found = tuple(Rate(10.0 * n, 8.0 if n < 30 else 20.0, 60.0) for n in range(40))
    newest = Rate(400.0, 20.0, 60.0)
    assert slope(found, newest, 180.0) > 0
    assert slope(found, newest, 180.0, (Jump(300.0, 2.5, 20.0),)) == 0.0
    after = tuple(Rate(10.0 * n, 8.0 if n < 30 else 20.0 + n - 30, 60.0) for n in range(48))
    grows = slope(after, Rate(480.0, 38.0, 60.0), 180.0, (Jump(300.0, 2.5, 20.0),))
    assert grows == pytest.approx(0.1), "what grows after it is one"


def test_a_step_and_a_rise_are_told_apart() -> None:
    def counts(rates: list[float]) -> list[tuple[float, float]]:
        return [(2.0, 2.0 * rate) for rate in rates]

    assert step_at(counts([8.0] * 20 + [20.0] * 10)) == 20
    assert step_at(counts([8.0] * 20 + [8.0 + 1.2 * n for n in range(10)])) is None
    assert step_at(counts([8.0 + 0.4 * n for n in range(30)])) is None
    assert step_at(counts([20.0] * 15 + [8.0] * 15)) is None, "that fell"
    assert step_at(counts([8.0])) is None
    assert step_at([]) is None
    assert step_at(counts([0.0] * 20 + [20.0] * 10)) == 20


@given(st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(0, 500)), max_size=30))
def test_a_step_begins_where_more_comes_than_before(counts: list[tuple[float, float]]) -> None:
    place = step_at(counts)
    if place is not None:
        before, after = (
            sum(came for _, came in part) / sum(seconds for seconds, _ in part)
            for part in (counts[:place], counts[place:])
        )
        assert before < after


def test_a_jump_is_one_that_chance_does_not_make_and_is_forgotten_after_an_hour() -> None:
    before = (Rate(0.0, 8.0, 60.0), Rate(30.0, 8.0, 60.0))
    (jump,) = leapt((), before, Rate(60.0, 20.0, 60.0))
    assert (jump.at, jump.factor, jump.rate) == (60.0, 2.5, 20.0)
    assert leapt((), before, Rate(60.0, 9.5, 60.0)) == ()
    assert leapt((), before[1:], Rate(60.0, 20.0, 60.0)) == (), "the spans overlap"
    assert leapt((), (Rate(0.0, 0.0, 60.0),), Rate(60.0, 20.0, 60.0)) == (), "from nothing is no factor"
    assert leapt((jump,), before, Rate(61.0 + MEMORY, 8.0, 60.0)) == ()
    several = tuple(Jump(float(at), 2.0, 20.0) for at in range(0, 1000, 10))
    assert len(leapt(several, before, Rate(1000.0, 8.0, 60.0))) < len(several)


def test_what_jumped_is_expected_again_up_to_a_little_above_where_it_came() -> None:
    jumps = (Jump(100.0, 2.5, 20.0), Jump(400.0, 1.4, 11.0))
    now = Rate(1000.0, 8.0, 60.0)
    assert surge(jumps, now, 0.0, 60.0, 0.01) == 2.5
    assert surge(jumps, Rate(1000.0, 20.0, 60.0), 0.0, 60.0, 0.01) == pytest.approx(1.1)
    assert surge(jumps, Rate(1000.0, 30.0, 60.0), 0.0, 60.0, 0.01) == 1.0, "as far as it ever jumped"
    assert surge(jumps, Rate(1000.0, 0.0, 60.0), 0.0, 60.0, 0.01) == 1.0
    assert surge((), now, 0.0, 60.0, 0.01) == 1.0


def test_a_jump_counts_only_if_more_moments_precede_one_than_may_miss() -> None:
    jumps = (Jump(100.0, 2.5, 20.0), Jump(400.0, 1.4, 20.0))
    now = Rate(2000.0, 8.0, 60.0)
    assert surge(jumps, now, 0.0, 10.0, 0.01) == 1.0, "starts are short"
    assert surge(jumps, now, 0.0, 60.0, 0.05) == 1.4
    assert surge(jumps, now, 0.0, 60.0, 0.2) == 1.0
    assert surge(jumps, now, 1990.0, 60.0, 0.2) == 2.5, "little is known yet"


def test_chance_is_hardly_ever_taken_for_a_jump() -> None:
    dice = random.Random(5)
    found: tuple[Rate, ...] = ()
    jumps: tuple[Jump, ...] = ()
    for at in range(0, 40_000, 10):
        newest = Rate(float(at), sum(dice.random() < 0.05 for _ in range(1200)) / 60, 60.0)
        jumps = leapt(jumps, found, newest)
        found = (*found, newest)[-20:]
    assert len(jumps) <= 2


positive = st.floats(0, 1000)


@given(positive, positive, positive, st.integers(0, 20), st.integers(0, 20), st.floats(0, 2000))
def test_what_still_waits_grows_with_the_work_and_falls_with_the_groups(
    backlog: float, more: float, load: float, serving: int, coming: int, start: float
) -> None:
    found = standing(backlog, load, serving, coming, start)
    assert found >= 0
    assert standing(backlog + more, load, serving, coming, start) >= found
    assert standing(backlog, load + more, serving, coming, start) >= found
    assert standing(backlog, load, serving + 1, coming, start) <= found
    assert standing(backlog, load, serving, coming + 1, start) <= found
    assert standing(backlog, load, serving, coming, 0.0) == backlog


@given(positive, positive, st.integers(0, 500), st.floats(0, 100))
def test_sequences_beyond_the_room_count_less_and_never_more(
    flying: float, more: float, room: int, slot: float
) -> None:
    found = in_flight(flying, room, slot, 60.0)
    assert min(flying, room) <= found <= flying
    assert in_flight(flying + more, room, slot, 60.0) >= found
    assert in_flight(float(room), room, slot, 60.0) == room
