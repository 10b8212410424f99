"""Traffic follows the pairs of each revision while a rollout runs."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.router.logic.endpoints import Endpoint, directory
from twinpool.router.logic.share import of_one_revision, shares

if TYPE_CHECKING:
    from twinpool.router.logic.endpoints import Directory


def fleet(**revisions: tuple[int, int]) -> Directory:
    """Return a directory with so many prefill and decode workers of each revision."""
    made = []
    for revision, counts in revisions.items():
        for role, count in zip(("prefill", "decode"), counts, strict=True):
            made += [
                Endpoint(f"{revision}-{role}-{n}", role, "127.0.0.1", 1, revision, admitted=True)  # type: ignore[arg-type]
                for n in range(count)
            ]
    return directory(made)


def test_a_revision_gets_what_its_scarcer_stage_can_do() -> None:
    found = shares(fleet(old=(1, 4), new=(1, 1)))
    assert found == {"old": pytest.approx(0.5), "new": pytest.approx(0.2)}


def test_a_revision_with_one_stage_gets_nothing() -> None:
    assert shares(fleet(old=(2, 4), new=(0, 1))).keys() == {"old"}
    assert shares(fleet(old=(2, 4), new=(1, 0))).keys() == {"old"}
    assert shares(fleet(old=(0, 4))) == {}


def test_requests_follow_the_shares() -> None:
    mixed = fleet(old=(2, 4), new=(1, 1))
    weights, rng = shares(mixed), random.Random(7)
    drawn = Counter(of_one_revision(mixed.prefill, weights, rng)[0].revision for _ in range(2000))
    assert drawn["new"] / 2000 == pytest.approx(weights["new"] / sum(weights.values()), abs=0.03)


def test_one_revision_needs_no_draw() -> None:
    alone = fleet(old=(3, 1))
    assert of_one_revision(alone.prefill, shares(alone), random.Random(1)) is alone.prefill


@given(st.tuples(*[st.integers(0, 5)] * 4), st.randoms(use_true_random=False))
def test_all_candidates_are_of_one_revision(counts: tuple[int, int, int, int], rng: random.Random) -> None:
    mixed = fleet(old=counts[:2], new=counts[2:])
    if mixed.prefill:
        chosen = of_one_revision(mixed.prefill, shares(mixed), rng)
        assert len({endpoint.revision for endpoint in chosen}) == 1
