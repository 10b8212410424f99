"""Drawn requests: the asked-for means, the manner's own traits, and the same for the same seed."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.core.errors import InvalidValue
from twinpool.simulate.generators import MANNERS, Manner, Shape, day, generate, renewals
from twinpool.simulate.traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.simulate.traces import Request


def drawn(manner: Manner, seed: int = 1, shape: Shape | None = None) -> tuple[Request, ...]:
    return generate(manner, shape or Shape(5.0, 3600.0), Random(seed))


def variation(values: Sequence[float]) -> float:
    return pstdev(values) / fmean(values)


@pytest.mark.parametrize("manner", MANNERS)
def test_rate_and_lengths_are_about_those_asked_for(manner: Manner) -> None:
    runs = [drawn(manner, seed) for seed in range(4)]
    assert fmean(len(run) for run in runs) == pytest.approx(5 * 3600, rel=0.15)
    requests = [request for run in runs for request in run]
    assert fmean(request.prompt for request in requests) == pytest.approx(2000, rel=0.2)
    assert fmean(request.output for request in requests) == pytest.approx(250, rel=0.2)
    assert runs[0] == drawn(manner, 0)
    assert runs[0] != runs[1]


def test_bursts_and_tails_are_the_manners() -> None:
    gaps, prompts = {}, {}
    for manner in MANNERS:
        requests = drawn(manner)
        gaps[manner] = variation([after.arrival - before.arrival for before, after in pairwise(requests)])
        prompts[manner] = variation([request.prompt for request in requests])
    assert gaps["poisson"] == pytest.approx(1.0, abs=0.05)
    assert gaps["burstgpt"] > 1.5
    assert gaps["servegen"] > 1.05
    assert prompts["poisson"] == pytest.approx(1.0, abs=0.1)
    assert min(prompts["burstgpt"], prompts["servegen"]) > 1.1


def test_few_clients_send_most_and_each_repeats_its_own_beginning() -> None:
    requests = drawn("servegen", shape=Shape(5.0, 3600.0, prompt=6000.0, shared=0.5))
    clients: dict[int, int] = {}
    for request in requests:
        if request.blocks:
            clients[request.blocks[0] >> 40] = clients.get(request.blocks[0] >> 40, 0) + 1
    counts = sorted(clients.values(), reverse=True)
    assert sum(counts[:5]) > 0.5 * sum(counts)
    long = [request for request in requests if len(request.blocks) >= 8 and request.blocks[0] >> 40 == 0]
    assert len({request.blocks[:4] for request in long}) == 1
    assert len({request.blocks[-1] for request in long}) == len(long)


def test_a_day_has_its_night_and_its_evening() -> None:
    assert day(5 * 3600) == pytest.approx(0.65)
    assert day(20 * 3600) == pytest.approx(1.43)
    assert day(29 * 3600) == pytest.approx(0.65)
    assert fmean(day(60.0 * minute) for minute in range(1440)) == pytest.approx(1.04, abs=0.01)
    counts = [0] * 24
    for request in drawn("servegen", shape=Shape(0.2, 86_400.0)):
        counts[int(request.arrival // 3600)] += 1
    assert sum(counts[17:23]) > 1.5 * sum(counts[2:8])


def test_renewals_follow_the_rate_of_each_minute() -> None:
    found = renewals([1.0, 10.0, 1.0], lambda _: 1.0, Random(3))
    assert sum(60 <= moment < 120 for moment in found) == pytest.approx(600, rel=0.15)
    assert found == sorted(found)


@pytest.mark.parametrize(
    "bad",
    [
        {"rate": 0.0}, {"seconds": -1.0}, {"prompt": 0.5}, {"answer": 0.0}, {"shared": 1.0}, {"shared": -0.1},
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidValue, match="no requests can be drawn"):
        Shape(**{"rate": 1.0, "seconds": 60.0, **bad})


@settings(max_examples=60, deadline=None)
@given(
    manner=st.sampled_from(MANNERS),
    rate=st.floats(0.01, 20),
    seconds=st.floats(0.5, 300),
    prompt=st.floats(1, 20_000),
    answer=st.floats(1, 2000),
    shared=st.floats(0, 0.99),
    seed=st.integers(0, 1000),
)
def test_every_drawn_request_is_one(
    manner: Manner, rate: float, seconds: float, prompt: float, answer: float, shared: float, seed: int
) -> None:
    requests = generate(manner, Shape(rate, seconds, prompt, answer, shared), Random(seed))
    assert all(0 <= request.arrival < seconds for request in requests)
    assert all(before.arrival <= after.arrival for before, after in pairwise(requests))
    for request in requests:
        assert 1 <= request.prompt <= math.ceil(30 * prompt)
        assert request.output >= 1
        assert len(request.blocks) == len(set(request.blocks)) == request.prompt // BLOCK_TOKENS
