"""How a rate moved over a start, and what of a backlog is left when a group is up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.operator.logic.trend import FARTHEST, Rate, in_flight, remembered, slope, standing


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
