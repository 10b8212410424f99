"""Prefill follows decode within the band, and moves no further than it must."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.ratio import Ratio
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.ratio import nearest, wanted
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool


@pytest.mark.parametrize(
    ("prefill", "decode", "low", "high", "expected"),
    [
        (2, 4, "1:4", "1:1", 2),
        (1, 8, "1:4", "1:1", 2),
        (9, 4, "1:4", "1:1", 4),
        (5, 0, "1:4", "1:1", 0),
        (0, 1, "1:8", "1:4", 1),
        (1, 3, "1:2", "1:2", 2),
        (1, 7, "1:3", "1:3", 2),
        (3, 2, "3:2", "3:1", 3),
    ],
)
def test_the_nearest_pair(prefill: int, decode: int, low: str, high: str, expected: int) -> None:
    assert nearest(prefill, decode, Ratio(min=low, max=high)) == expected


@given(st.integers(0, 64), st.integers(0, 64), st.tuples(*[st.integers(1, 9)] * 4))
def test_the_band_is_kept_where_a_whole_number_keeps_it(
    prefill: int, decode: int, parts: tuple[int, int, int, int]
) -> None:
    low, high = sorted((Fraction(parts[0], parts[1]), Fraction(parts[2], parts[3])))
    band = Ratio(min=f"{low.numerator}:{low.denominator}", max=f"{high.numerator}:{high.denominator}")
    found = nearest(prefill, decode, band)
    inside = [count for count in range(64 * 9 + 1) if low * decode <= count <= high * decode]
    if inside:
        assert found == min(inside, key=lambda count: abs(count - prefill))
    else:
        assert found >= 1
        assert -1 < found - low * decode < 1
    assert nearest(found, decode, band) == found, "what is in place stays"


def test_a_pool_without_a_band_has_what_it_says(make_pool: Callable[..., InferencePool]) -> None:
    assert wanted(make_pool({"prefill": {"replicas": 3}})) == {"prefill": 3, "decode": 1}
    assert wanted(make_pool(prefill=None)) == {"decode": 1}


def test_scaling_decode_takes_prefill_along(make_pool: Callable[..., InferencePool], model_cluster: Any) -> None:
    band = {"ratio": {"min": "1:2", "max": "1:1"}}
    cluster = model_cluster(make_pool({"decode": {"replicas": 2}, **band}))
    cluster.settle()
    cluster.pool = make_pool({"decode": {"replicas": 6}, **band})
    cluster.settle()
    status = plan(cluster.observed(), Settings(), cluster.now).status
    assert (status["prefill"]["summary"], status["decode"]["summary"]) == ("3/3", "6/6")
    assert (status["ratio"], status["targetRatio"]) == ("1:2", "1:2")
