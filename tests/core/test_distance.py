"""Places of workers in the network: what is written on pods, and what two of them have in common."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.distance import Place, bandwidth, place
from twinpool.core.topology import PRESETS, topology

TOPOLOGY = topology(PRESETS["topograph"])
LEVELS = len(TOPOLOGY.levels)
domains = st.lists(st.sampled_from(["a", "b", None]), min_size=LEVELS - 1, max_size=LEVELS - 1)


def at(*path: str | None) -> Place:
    return place(("cluster", *path), TOPOLOGY)


@given(domains)
def test_what_is_written_is_read(path: list[str | None]) -> None:
    assert Place.from_json(at(*path).to_json()) == at(*path)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "7", '{"path":[]}', '{"path":["c"],"bandwidths":[]}', '{"path":[],"bandwidths":[]}',
        '{"path":["c"],"bandwidths":[0]}', '{"path":["c"],"bandwidths":["x"]}',
        '{"path":["c"],"bandwidths":[Infinity]}',
        '{"path":7,"bandwidths":[1]}', '{"path":["c"],"bandwidths":[NaN]}',
    ],
)  # fmt: skip
def test_anything_else_is_no_place(text: str) -> None:
    assert Place.from_json(text) is None


def test_the_narrowest_level_that_two_share_says_how_fast_they_are() -> None:
    by_name = {level.name: float(f"{level.bandwidth:.1e}") for level in TOPOLOGY.levels}
    one = at("z", "f", "b", "r", "n", "h1")
    assert bandwidth(one, one) == by_name["host"]
    assert bandwidth(one, at("z", "f", "b", "r", "n", "h2")) == by_name["nvlink"]
    assert bandwidth(one, at("z", "f", "b", "r", None, "h2")) == by_name["rack"]
    assert bandwidth(one, at("z", "f", "other", "r", "n", "h2")) == by_name["fabric"], "a rack of another block"
    assert bandwidth(one, at("elsewhere", "f", "b", "r", "n", "h2")) == by_name["cluster"]


@given(domains, domains)
def test_distance_has_no_direction(one: list[str | None], other: list[str | None]) -> None:
    assert bandwidth(at(*one), at(*other)) == bandwidth(at(*other), at(*one))


def test_of_two_words_the_lesser_counts_and_of_two_networks_none() -> None:
    one = at("z", "f", "b", "r", "n", "h1")
    slower = Place(one.path, tuple(size / 2 for size in one.bandwidths))
    assert bandwidth(one, slower) == bandwidth(one, one) / 2  # type: ignore[operator]
    assert bandwidth(one, Place(("cluster", "h1"), (1e9, 2e9))) is None


def test_bandwidths_have_two_digits_so_that_medians_may_move_a_little() -> None:
    assert all(f"{size:.1e}" == f"{size:.3e}".replace("00e", "e") for size in at(*[None] * (LEVELS - 1)).bandwidths)
    assert json.loads(at(*[None] * (LEVELS - 1)).to_json())["path"][0] == "cluster"
