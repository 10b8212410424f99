"""Experts of the simulated engine: steps wait for the busiest GPU until experts have moved."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.errors import InvalidValue
from twinpool.localengine.pod import worker_config
from twinpool.worker.engines.simulated import flags
from twinpool.worker.engines.simulated.logic.engine import Engine, Limits
from twinpool.worker.engines.simulated.logic.experts import Balancing, Mixture, balanced, linear, mixture
from twinpool.worker.engines.simulated.logic.pace import Pace
from twinpool.worker.engines.simulated.logic.sequence import Order
from twinpool.worker.logic import experts

if TYPE_CHECKING:
    from twinpool.core.protocol import WorkerConfig


@given(
    loads=st.lists(st.floats(0.01, 100), min_size=8, max_size=32).filter(lambda loads: len(loads) % 4 == 0),
    copies=st.integers(0, 4).map(lambda n: 4 * n),
)
def test_every_layout_holds_all_the_load_and_balancing_is_never_far_from_the_best(
    loads: list[float], copies: int
) -> None:
    before, after = linear(loads, 4, copies), balanced(loads, 4, copies)
    assert sum(before) == pytest.approx(sum(loads))
    assert sum(after) == pytest.approx(sum(loads))
    assert max(after) <= sum(loads) / 4 + max(loads) + 1e-6


def test_skew_slows_steps_until_experts_move() -> None:
    even, skewed = Mixture(8), Mixture(8, skew=1.0, balancing=Balancing(32, interval=10))
    assert even.factor(0) == pytest.approx(1.0)
    assert skewed.ratio(0) > 2.5
    assert skewed.factor(0) > 1.7
    assert skewed.ratio(10) < 1.1
    assert Mixture(8, skew=1.0).ratio(10_000) > 3, "without balancing nothing moves"


def test_the_log_is_what_the_launcher_reads() -> None:
    mixed = Mixture(8, skew=1.0, balancing=Balancing(told_every=2))
    assert mixed.line(1, 64) == ""
    assert mixed.line(2, 0) == ""
    assert mixed.silent().line(2, 64) == ""
    assert Mixture(8).silent() == Mixture(8)
    line = mixed.line(2, 64)
    assert line.startswith("EPLB step: 2 for model simulated: avg_tokens=3712.00, max_tokens=")
    config = flags_config(tensor=8)
    got = experts.read(config, ["noise", line], layers=58)
    assert got is not None
    assert got.ratio == pytest.approx(mixed.ratio(2), rel=1e-3)
    assert got.significant


def flags_config(**changes: Any) -> WorkerConfig:
    own: dict[str, Any] = {"engine": "simulated"}
    return worker_config(**{**own, **changes})


def test_an_engine_tells_and_waits() -> None:
    def seconds(mixed: Mixture | None) -> tuple[float, list[str]]:
        engine = Engine(Limits(), Pace(), mixture=mixed)
        engine.submit(Order("o", tuple(range(100)), 4, ignore_eos=True), 0.0)
        total = 0.0
        while engine.unfinished:
            step, _ = engine.begin(total)
            assert step is not None
            total += step.seconds
            engine.end(total)
        return total, engine.log

    alone, silent = seconds(None)
    slow, told = seconds(Mixture(8, skew=1.0, balancing=Balancing(told_every=3)))
    assert slow == pytest.approx(alone * Mixture(8, skew=1.0).factor(0))
    assert silent == []
    assert len(told) == 2


def test_flags_are_vllms() -> None:
    config = json.dumps({"num_redundant_experts": 8, "step_interval": 7, "log_balancedness": True})
    words = ["--model", "m", "--enable-expert-parallel", "--tensor-parallel-size=8", "--expert-skew=0.5"]
    made = flags.parse([*words, "--enable-eplb", "--eplb-config", config]).mixture
    assert made == Mixture(8, 256, 0.5, Balancing(8, 7, 1))
    assert flags.parse(words).mixture == Mixture(8, 256, 0.5)
    assert flags.parse(["--model", "m", "--enable-expert-parallel"]).mixture is None
    with pytest.raises(InvalidValue, match="several ranks"):
        flags.parse(["--model", "m", "--enable-eplb"])


@pytest.mark.parametrize(
    ("config", "words", "enabled"),
    [
        ("{}", "needs --enable-eplb", False),
        ("{", "not JSON", True),
        ('{"x": 1}', "keys that are not known", True),
        ('{"num_redundant_experts": 3}', "cannot be spread evenly", True),
    ],
)
def test_settings_that_cannot_be_used_are_refused(config: str, words: str, enabled: bool) -> None:
    with pytest.raises(InvalidValue, match=words):
        mixture(8, 256, 0.0, enabled=enabled, config=config)
