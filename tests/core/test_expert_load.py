"""Skew of experts is told from chance: even routing is not called skewed, real skew is."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.expert_load import StepLoad, balance, expected_most


def sampled(tokens, ranks, layers, weights, seed):
    """Draw where ``tokens`` of a step go in each layer; return what vLLM would log."""
    draws = random.Random(seed)
    mean = most = 0.0
    for _ in range(layers):
        counts = [0] * ranks
        for rank in draws.choices(range(ranks), weights, k=tokens):
            counts[rank] += 1
        mean += tokens / ranks
        most += max(counts)
    return StepLoad(mean, most)


@pytest.mark.parametrize("ranks", [2, 4, 8, 32])
@pytest.mark.parametrize("tokens", [8, 64, 1024])
def test_even_routing_is_never_called_skewed(ranks, tokens):
    for seed in range(5):
        got = balance([sampled(tokens, ranks, 8, [1] * ranks, seed + 9 * step) for step in range(8)], ranks, 8)
        assert not got.significant
        assert got.ratio <= got.noise * 1.1


@pytest.mark.parametrize("tokens", [64, 1024])
def test_one_rank_with_thrice_the_load_of_the_others_is(tokens):
    got = balance([sampled(tokens, 8, 8, [3] + [1] * 7, step) for step in range(8)], 8, 8)
    assert got.significant
    assert got.ratio == pytest.approx(2.4, rel=0.15), "3 of 10 parts, where 1.25 would be even"
    assert got.steps == 8


def test_few_tokens_prove_nothing():
    assert balance([StepLoad(2.0, 5.0)], 8, 2).significant is False
    assert balance([StepLoad(2e6, 5e6)], 8, 2).significant is True


@given(steps=st.lists(st.builds(StepLoad, st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=1, max_size=32))
def test_more_layers_and_more_ranks_make_more_of_it_noise(steps):
    one, more, wide = balance(steps, 8, 1), balance(steps, 8, 64), balance(steps, 64, 1)
    assert 1 <= one.noise <= more.noise
    assert one.noise <= wide.noise
    assert one.ratio == more.ratio == wide.ratio


def test_many_tokens_are_bound_as_the_normal_distribution_says():
    assert expected_most(1e6, 8) == pytest.approx(1e6 + math.sqrt(2e6 * math.log(8)), rel=1e-5)
    assert expected_most(0.01, 8) == pytest.approx(0.08), "a GPU may get all of them"


def test_nothing_to_balance():
    assert balance([], 8, 4) is None
    assert balance([StepLoad(0.0, 0.0)], 8, 4) is None
    assert balance([StepLoad(9.0, 9.0)], 1, 4) is None
