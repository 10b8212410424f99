"""Links of levels: what was said of them, what was measured, and which of both counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.errors import InvalidValue
from twinpool.core.links import (
    AT_LEAST,
    FURTHEST,
    Measured,
    combined,
    level_links,
    with_links,
    with_measured,
)
from twinpool.core.topology import CLUSTER, HOST, LINKS, NAMES, PRESETS, preset, topology

MADE = topology(PRESETS["topograph"])


def test_bandwidths_and_latencies_of_levels_can_be_told() -> None:
    made = with_links(preset("topograph"), "rack=25G@4us, host=32000000000,block=1G@800ns")
    levels = {level.name: level for level in made.levels}
    assert (levels["rack"].bandwidth, levels["rack"].latency) == (25e9, pytest.approx(4e-6))
    assert (levels[HOST].bandwidth, levels[HOST].latency) == (32e9, LINKS[HOST][1])
    assert (levels["block"].latency, levels["fabric"].bandwidth) == (pytest.approx(8e-7), LINKS["fabric"][0])
    assert with_links(preset("hostname"), "rack=25G") == preset("hostname"), "a level that is not there"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("moon=1G", "the link 'moon=1G' is not understood"),
        ("rack", "the link 'rack' is not understood"),
        ("rack=fast", "'fast' is not a size"),
        ("rack=1G@", "the latency of the link 'rack=1G@' is not understood"),
        ("rack=1G@3", "the latency of the link 'rack=1G@3' is not understood"),
        ("rack=1G@-3us", "the latency of the link"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidValue, match=problem):
        with_links(preset("auto"), text)


def test_the_median_of_all_pairs_counts_and_one_bad_cable_changes_nothing() -> None:
    several = [Measured("rack", 3, 30e9, 2e-6), Measured("rack", 1, 1e6, 1e-3), Measured("rack", 2, 40e9, 3e-6)]
    found = combined(several)["rack"]
    assert (found.pairs, found.bandwidth, found.latency) == (6, 30e9, 2e-6)
    made = with_measured(MADE, several)
    rack = made.levels[made.index("rack")]
    assert (rack.bandwidth, rack.latency, rack.measured) == (30e9, 2e-6, True)


def test_few_pairs_do_not_count() -> None:
    few = [Measured("rack", AT_LEAST - 1, 1e9, 1e-6)]
    assert with_measured(MADE, few) == MADE
    assert with_measured(MADE, [*few, Measured("rack", 1, 1e9, 1e-6)]) != MADE
    assert with_measured(MADE, [Measured("moon", 9, 1e9, 1e-6)]) == MADE, "a level that is not there"


def test_what_is_far_off_is_taken_for_less_far_off() -> None:
    for bandwidth, factor in ((1.0, 1 / FURTHEST), (1e15, FURTHEST)):
        made = with_measured(MADE, [Measured("rack", 5, bandwidth, 1.0)])
        rack = made.levels[made.index("rack")]
        assert rack.bandwidth == pytest.approx(LINKS["rack"][0] * factor)
        assert rack.latency == pytest.approx(LINKS["rack"][1] * FURTHEST)


def test_what_leaves_a_slow_level_is_no_faster() -> None:
    """Otherwise the narrow level would be the slowest of all, and being near would be worth nothing."""
    made = with_measured(MADE, [Measured("rack", 5, 5e9, 1e-6)])
    speeds = {level.name: level.bandwidth for level in made.levels}
    assert (speeds["rack"], speeds["block"], speeds["fabric"], speeds[CLUSTER]) == (5e9, 5e9, 5e9, 3.125e9)
    assert speeds["nvlink"] == LINKS["nvlink"][0], "what is inside it is as it was"
    assert made.price(0) == 1.0
    told = {link.level: link for link in level_links(MADE, [Measured("rack", 5, 5e9, 1e-6)])}
    assert (told["rack"].configured, told["rack"].used) == (50e9, 5e9)
    assert told["rack"].measured == Measured("rack", 5, 5e9, 1e-6)
    assert (told["block"].configured, told["block"].used, told["block"].measured) == (25e9, 5e9, None)


@given(
    st.lists(
        st.builds(
            Measured,
            st.sampled_from((CLUSTER, *NAMES)),
            st.integers(1, 50),
            st.floats(1.0, 1e13),
            st.floats(1e-9, 1.0),
        ),
        max_size=12,
    )
)
def test_prices_keep_their_meaning_whatever_is_measured(measured: list[Measured]) -> None:
    made = with_measured(MADE, measured)
    prices = [made.price(index) for index in range(len(made.levels))]
    assert all(0 < price <= 1 for price in prices)
    assert prices == sorted(prices, reverse=True), "being close never costs more"
    assert with_measured(MADE, reversed(measured)) == made
    for said, now in zip(MADE.levels, made.levels, strict=True):
        assert said.bandwidth / FURTHEST <= now.bandwidth or not now.measured
