"""The exact solver agrees. The benchmark asks it about hundreds of cases; these few keep the comparison right."""

from __future__ import annotations

from random import Random

import pytest

from bench.placement.baselines import RULES, Ground
from bench.placement.compare import compare
from bench.placement.quality import case, ours, quality


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nothing_is_refused_that_fits_and_nothing_is_far_from_the_optimum(seed: int) -> None:
    found = compare(seed)
    assert found.wrong == ()
    assert -1e-6 <= found.gap <= 0.1


def test_other_rules_place_within_capacity_and_never_better() -> None:
    question = case(Random(3), 160)
    best = quality(question, ours, Random(3))
    for rule in RULES.values():
        ground = Ground(question, Random(3))
        placed = rule(ground)
        assert min(ground.free) >= 0
        other = quality(question, rule, Random(3))
        assert other.placed == len(placed)
        if other.placed == best.placed:
            assert best.objective <= other.objective
