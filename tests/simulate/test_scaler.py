"""The operator's autoscaler on a simulated pool: numbers follow the work, within the limits, and no two runs differ."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from twinpool.core.economics import prices_of
from twinpool.core.kv import SHAPES
from twinpool.core.spec import InferencePool
from twinpool.core.timing import ACCELERATORS
from twinpool.simulate.fleet import Life, Loss
from twinpool.simulate.pool import Played, Setup, play
from twinpool.simulate.scaler import life_of
from twinpool.simulate.scores import score
from twinpool.simulate.traces import Request

PRICES = prices_of(SHAPES["llama-3-8b"], ACCELERATORS["h100"])


def pool(**scaling: Any) -> InferencePool:
    role = {"min": 1, "max": 8}
    body = {"prefill": role, "decode": role, "window": "30s", "stabilization": {"scaleIn": "60s"}, **scaling}
    spec = {
        "model": {"name": "m"}, "prefill": {}, "decode": {}, "objectives": {"ttft": "1s", "itl": "30ms"},
        "scaling": {key: value for key, value in body.items() if value is not None},
    }  # fmt: skip
    return InferencePool.model_validate({"metadata": {"name": "p"}, "spec": spec})


def requests(*parts: tuple[float, float, float, float], seed: int = 1) -> list[Request]:
    """Return Poisson arrivals: (seconds, requests/s, mean prompt, mean answer), one part after the other."""
    dice, found, begin = Random(seed), [], 0.0
    for seconds, rate, prompt, output in parts:
        now = begin
        while rate and (now := now + dice.expovariate(rate)) < begin + seconds:
            size = max(50, min(20_000, int(dice.expovariate(1 / prompt))))
            found.append(Request(now, size, max(2, min(2000, int(dice.expovariate(1 / output))))))
        begin += seconds
    return found


def played(trace: list[Request], spec: InferencePool, losses: tuple[Loss, ...] = (), **changed: Any) -> Played:
    setup = Setup(
        PRICES, 1, 1, 200_000, 400_000, routers=2, exchange=0.2, ttft=1.0,
        life=life_of(spec, 20.0, losses), scaling=spec,
    )  # fmt: skip
    return play(trace, replace(setup, **changed))


RISE = requests((100, 3, 3000, 200), (160, 14, 3000, 200), (160, 3, 3000, 200))

#: Slow enough to be no jump, for which groups would be kept.
CLIMB = requests(
    (100, 3, 3000, 200), *[(20, 4 + n, 3000, 200) for n in range(10)], (100, 14, 3000, 200), (200, 3, 3000, 200)
)


@pytest.mark.parametrize("conditional", [False, True])
def test_numbers_follow_a_rise_and_a_fall(conditional: bool) -> None:
    found = played(CLIMB, pool(), conditional=conditional)
    most = [max(pair[role] for _, pair in found.course) for role in (0, 1)]
    assert most[0] >= 3
    assert most[1] >= 2
    assert sum(found.course[-1][1]) < sum(most)
    assert [change.pair for change in found.changes][-1] == found.course[-1][1]
    few = played(CLIMB, pool(), scaling=None, conditional=conditional)
    kept = score(found.jobs, 1.0, 0.03).attainment
    assert kept > 0.98
    assert kept > score(few.jobs, 1.0, 0.03).attainment + 0.3
    assert found.gpu_hours < 0.9 * sum(most) * CLIMB[-1].arrival / 3600


def test_the_same_run_twice_is_the_same() -> None:
    one, two = (played(RISE[:1500], pool()) for _ in range(2))
    assert (one.course, one.changes, one.gpu_hours) == (two.course, two.changes, two.gpu_hours)
    assert [job.finish for job in one.jobs] == [job.finish for job in two.jobs]


def test_a_shift_of_lengths_at_the_same_rate_moves_the_ratio() -> None:
    found = played(requests((150, 8, 600, 700), (200, 8, 5000, 40)), pool())
    at = {moment: next(pair for since, pair in reversed(found.course) if since <= moment) for moment in (140, 260)}
    assert at[140][1] >= at[140][0]
    assert at[260][0] > at[260][1]


def test_a_budget_holds_at_every_moment_and_is_used_whole() -> None:
    found = played(RISE, pool(gpuBudget=4))
    assert max(sum(pair) for _, pair in found.course) == 4


def test_lost_groups_come_again() -> None:
    found = played(RISE, pool(), (Loss(180.0, "prefill", 2), Loss(181.0, "decode", 1)))
    ((at, lost),) = [(at, pair) for at, pair in found.course if at == 180.0]
    before = [pair for when, pair in found.course if when < at][-1]
    assert lost[0] == before[0] - 2
    assert all(job.first < float("inf") for job in found.jobs)
    after = [pair for when, pair in found.course if 181.0 <= when <= 202.0]
    assert sum(after[-1]) > sum(after[0])


def test_a_rollout_while_numbers_follow_the_work_breaks_no_request_and_keeps_the_budget() -> None:
    spec = pool(gpuBudget=9)
    found = played(RISE, spec, life=life_of(spec, 20.0, rolls=(150.0,)))
    assert all(job.finish < float("inf") for job in found.jobs if job.first < float("inf"))
    assert max(sum(pair) for _, pair in found.course) <= 9
    assert score(found.jobs, 1.0, 0.03).attainment > 0.95


def test_a_pool_that_went_to_zero_comes_back_with_the_next_request() -> None:
    role = {"min": 0, "max": 4}
    spec = pool(prefill=role, decode=role, stabilization={"scaleIn": "30s"})
    trace = [*requests((60, 3, 500, 50)), Request(400.0, 500, 50), Request(401.0, 500, 1)]
    found = played(trace, spec)
    assert (0, 0) in [pair for _, pair in found.course]
    assert found.jobs[-1].first - 401.0 == pytest.approx(20.0, abs=4.0), "a start, and what it takes to notice"
    assert [change.reason for change in found.changes if "somebody asks" in change.reason]


def test_groups_let_go_are_put_back_when_an_objective_suffers() -> None:
    trace = requests((150, 10, 3000, 200), (130, 2, 3000, 200), (100, 12, 3000, 200))
    found = played(trace, pool(window="60s"))
    again = [(at, pair) for at, pair in found.course if at > 280]
    first = next((at for at, pair in again if pair > next(p for a, p in reversed(found.course) if a <= 280)), None)
    assert first is not None
    assert first < 280 + 20 + 20


def test_the_life_of_a_pool_is_what_its_spec_says() -> None:
    fixed = InferencePool.model_validate(
        {"metadata": {"name": "p"}, "spec": {"model": {"name": "m"}, "prefill": {}, "decode": {"replicas": 1}}}
    )
    assert life_of(fixed, 5.0, ()) == Life(5.0, (), (1, 1), None, 0.0)
    assert life_of(pool(gpuBudget=9), 5.0, [Loss(1.0, "decode")]) == Life(5.0, (Loss(1.0, "decode"),), (1, 1), 9, 30.0)
