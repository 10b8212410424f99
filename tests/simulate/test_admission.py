"""The queue of simulated routers: what it holds back, who goes first, and what that is worth in overload."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from twinpool.core.economics import prices_of
from twinpool.core.kv import SHAPES
from twinpool.core.timing import ACCELERATORS
from twinpool.router.logic.places import Places
from twinpool.simulate.admission import Admission, Limits
from twinpool.simulate.clock import Clock
from twinpool.simulate.engines import Job
from twinpool.simulate.fleet import Life, Loss
from twinpool.simulate.pool import Setup, play, simulate
from twinpool.simulate.traces import Request

if TYPE_CHECKING:
    from twinpool.core.protocol import Role

PRICES = prices_of(SHAPES["llama-3-8b"], ACCELERATORS["h100"])
SECONDS, TTFT, ITL = 60.0, 1.0, 0.03
ENDS: tuple[Role, ...] = ("decode", "prefill", "decode", "decode")
SETUP = Setup(
    PRICES, 2, 2, 200_000, 400_000, routers=2, exchange=0.2, ttft=TTFT, both_links=True, sequences=64, queue=Limits()
)


def poisson(rate: float, prompt: float, answer: float, seed: int = 1) -> list[Request]:
    dice, moment, found = Random(seed), 0.0, list[Request]()
    while (moment := moment + dice.expovariate(rate)) < SECONDS:
        size = max(50, min(20_000, int(dice.expovariate(1 / prompt))))
        found.append(Request(moment, size, max(2, int(dice.expovariate(1 / answer)))))
    return found


def goodput(jobs: list[Job]) -> float:
    """Return the requests per second that kept both objectives."""
    kept = [
        job.first - job.request.arrival <= TTFT and (job.finish - job.first) / max(1, job.request.output - 1) <= ITL
        for job in jobs
    ]
    return sum(kept) / SECONDS


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize(("prompt", "answer", "saturation"), [(3000.0, 100.0, 14.0), (500.0, 600.0, 15.0)])
def test_at_twice_the_saturation_goodput_stays_where_it_would_be_lost_without_the_queue(
    prompt: float, answer: float, saturation: float, conditional: bool
) -> None:
    setup = replace(SETUP, conditional=conditional)
    best = max(goodput(simulate(poisson(saturation * load, prompt, answer), setup)) for load in (0.7, 0.85, 1.0))
    far = poisson(saturation * 2.6, prompt, answer)
    assert goodput(simulate(far, setup)) >= 0.9 * best
    assert goodput(simulate(far, replace(setup, queue=None))) < 0.5 * best


def admission(limits: Limits, places: Places) -> tuple[Clock, Admission, list[Job]]:
    clock, begun = Clock(), list[Job]()
    made = Admission(clock, limits, 1.0, begun.append)
    made.resize(places)
    return clock, made, begun


def test_who_finds_no_place_waits_and_is_turned_away_in_time() -> None:
    clock, queue, begun = admission(Limits(timeout=5.0), Places(1))
    jobs = [Job(Request(0.0, 10, 10)) for _ in range(3)]
    for job in jobs:
        queue.enter(job)
    assert (len(begun), queue.waiting, queue.crowded) == (1, 2, True)
    clock.at(0.4, lambda: queue.leave(jobs[0]))
    clock.run()
    assert begun == jobs[:2]
    assert queue.waiting == 0
    queue.leave(jobs[1])
    clock.run()
    assert len(begun) == 2, "the third had gone"


def test_a_full_queue_takes_nobody_more() -> None:
    clock, queue, begun = admission(Limits(most=1), Places(1))
    for _ in range(3):
        queue.enter(Job(Request(0.0, 10, 10)))
    assert (len(begun), queue.waiting) == (1, 1)
    clock.run()


def test_prompts_that_are_computed_hold_others_back() -> None:
    clock, queue, begun = admission(Limits(), Places(10, 0.5))
    jobs = [Job(Request(0.0, 10, 10)) for _ in range(3)]
    queue.enter(jobs[0])
    queue.sent(jobs[0], 0.6)
    queue.enter(jobs[1])
    assert begun == jobs[:1]
    queue.computed(jobs[0])
    queue.computed(jobs[0])
    clock.run()
    assert begun == jobs[:2]
    assert not queue.crowded


def test_a_request_that_lost_its_worker_keeps_its_place() -> None:
    clock, queue, begun = admission(Limits(), Places(1))
    first, second = (Job(Request(0.0, 10, 10)) for _ in range(2))
    queue.enter(first)
    queue.enter(second)
    queue.leave(first)
    queue.keep(first)
    clock.run()
    assert begun == [first]


def test_places_come_back_whatever_is_lost() -> None:
    losses = tuple(Loss(10.0 + 7 * n, role) for n, role in enumerate(ENDS))
    setup = replace(SETUP, conditional=True, life=Life(5.0, losses), exchange=None)
    played = play([*poisson(18.0, 3000.0, 200.0), Request(90.0, 500, 20), Request(90.1, 500, 20)], setup)
    last = played.jobs[-2:]
    assert all(job.finish < math.inf for job in last)
    assert all(job.first - job.request.arrival < 0.2 for job in last)


def test_with_conditional_handoffs_the_rule_still_chooses_who_prefills() -> None:
    trace = poisson(10.0, 3000.0, 100.0)
    runs = [simulate(trace, replace(SETUP, rule=rule, conditional=True)) for rule in ("price", "round-robin")]
    firsts = [[job.first for job in jobs] for jobs in runs]
    assert firsts[0] != firsts[1]


def test_an_engine_runs_no_more_sequences_than_it_may() -> None:
    trace = [Request(0.0, 50, 200) for _ in range(40)]
    few, many = (simulate(trace, replace(SETUP, queue=None, decode=1, sequences=limit)) for limit in (4, 64))
    assert max(job.first for job in few) > 5 * max(job.first for job in many)
    assert all(job.finish < math.inf for job in few)
