"""The work that arrives: counted before the queue, added up over processes, learnt from warm and idle workers only."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from twinpool.core.economics import ASSUMED
from twinpool.router.logic.arrivals import COLD_LEGS, Arrivals, total
from twinpool.router.logic.asked import Work
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.ledger import Ledger
from twinpool.router.logic.meter import Meter
from twinpool.router.logic.policy import Ask

P, D = Endpoint("p0", "prefill", "h", 1), Endpoint("d0", "decode", "h", 1)
WORK = Work(ASSUMED.prefill(4000, 0), 0.0, 0)


def meter() -> Meter:
    return Meter(Ledger())


def test_requests_are_counted_with_the_work_that_they_bring() -> None:
    ours = meter()
    ours.arrived(Ask(1000, 50))
    ours.arrived(Ask(3000, 70))
    works = [ASSUMED.prefill(1000, 0), ASSUMED.prefill(3000, 0)]
    found = ours.arrivals
    assert (found.requests, found.prompt_tokens, found.output_tokens) == (2, 4000, 120)
    assert found.prefill == pytest.approx(sum(works))
    assert found.prefill_squared == pytest.approx(sum(work * work for work in works))


def test_what_engines_had_cached_lightens_the_work_of_those_that_come() -> None:
    ours = meter()
    for _ in range(300):
        ours.prefilled(P, WORK, 4000, 0.1, cached=2000)
    ours.prefilled(P, WORK, 4000, 0.1, cached=None)
    assert ours.arrivals.cached_tokens / ours.arrivals.answered_tokens == 0.5
    ours.arrived(Ask(4000, 9))
    assert ours.arrivals.prefill == pytest.approx(ASSUMED.prefill(2000, 2000))
    for _ in range(300):
        ours.prefilled(P, WORK, 4000, 0.1, cached=0)
    before = ours.arrivals.prefill
    ours.arrived(Ask(4000, 9))
    assert ours.arrivals.prefill - before == pytest.approx(ASSUMED.prefill(4000, 0), rel=0.02)


def test_times_of_cold_and_of_busy_workers_teach_nothing() -> None:
    ours = meter()
    for _ in range(COLD_LEGS):
        ours.prefilled(P, WORK, 4000, 99.0, None)
        ours.wrote(D, 10, 99.0)
    assert (ours.arrivals.prefills, ours.arrivals.steps) == (0, 0)
    ours.prefilled(P, replace(WORK, before=5.0), 4000, 99.0, None)
    assert ours.arrivals.prefills == 0
    ours.prefilled(P, WORK, 4000, 2 * WORK.seconds, None)
    ours.wrote(D, 10, 3 * ASSUMED.step(1, 0))
    ours.wrote(D, 1, 0.0)
    found = ours.arrivals
    assert (found.prefills, found.steps, found.streams, found.streamed_tokens) == (1, 1, COLD_LEGS + 2, 41)
    assert math.exp(found.prefill_log) == pytest.approx(2)
    assert math.exp(found.step_log) == pytest.approx(3)
    ours.keep({"d0"})
    ours.prefilled(P, WORK, 4000, 2 * WORK.seconds, None)
    assert found.prefills == 1, "a worker that is known no more is cold when it comes again"


def test_an_engine_that_had_most_of_a_prompt_is_not_taken_for_a_fast_one() -> None:
    ours = meter()
    for _ in range(COLD_LEGS + 1):
        ours.prefilled(P, WORK, 4000, ASSUMED.prefill(1000, 3000), cached=3000)
    assert ours.arrivals.prefill_log == pytest.approx(0.0)
    ours.prefilled(P, WORK, 4000, ASSUMED.prefill(1, 4000), cached=4000)
    assert ours.arrivals.prefill_log == pytest.approx(0.0)


def test_one_stall_counts_as_sixteen_times_too_slow() -> None:
    found = Arrivals()
    found.prefilled(1.0, 1e6)
    found.prefilled(0.0, 1.0)
    assert (math.exp(found.prefill_log), found.prefills) == (pytest.approx(16), 1)


def test_numbers_of_processes_add_up() -> None:
    one, other = Arrivals(), Arrivals()
    one.arrived(10, 5, 1.0)
    other.arrived(20, 5, 2.0)
    other.streamed(7)
    other.cached(3, 9)
    both = total([one, other, Arrivals()])
    assert (both.requests, both.prompt_tokens, both.prefill, both.prefill_squared) == (2, 30, 3.0, 5.0)
    assert (both.streamed_tokens, both.answered_tokens, both.cached_tokens) == (7, 9, 9)
