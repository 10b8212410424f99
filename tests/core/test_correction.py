"""The correction finds a constant factor, and no single sample carries it away."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.correction import Correction

seconds = st.floats(0.001, 1000)


def after(samples):
    learnt = Correction()
    for predicted, observed in samples:
        learnt.learn(predicted, observed)
    return learnt


@given(factor=st.floats(0.05, 20))
def test_a_constant_factor_is_found(factor):
    assert after([(2.0, 2.0 * factor)] * 300).factor == pytest.approx(factor, rel=0.02)


def test_one_stall_in_twenty_moves_it_little():
    samples = ([(1.0, 1.4)] * 19 + [(1.0, 600.0)]) * 20
    assert after(samples).factor == pytest.approx(1.4, rel=0.08)


@given(st.lists(st.tuples(seconds, seconds), max_size=50), seconds, seconds)
def test_each_sample_moves_it_by_a_bounded_step_and_never_out_of_bounds(samples, predicted, observed):
    before, moved = after(samples), after([*samples, (predicted, observed)])
    assert abs(moved.log_factor - before.log_factor) <= math.log(2) / 2 + 1e-9
    assert 1 / 64.001 <= moved.factor <= 64.001


@pytest.mark.parametrize(("predicted", "observed"), [(0.0, 1.0), (1.0, 0.0), (1.0, math.inf), (1.0, math.nan)])
def test_a_sample_without_a_time_says_nothing(predicted, observed):
    known = Correction(0.3, 7)
    known.learn(predicted, observed)
    assert known == Correction(0.3, 7)


@pytest.mark.parametrize(("observed", "limit"), [(1e9, 64.0), (1e-9, 1 / 64)])
def test_it_stays_within_its_bounds_however_long_samples_say_otherwise(observed, limit):
    assert after([(1.0, observed)] * 400).factor == pytest.approx(limit)
