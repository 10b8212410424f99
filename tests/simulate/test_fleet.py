"""Groups that come, go and are lost: who is served by whom, what they cost, and that nothing is forgotten."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.core.economics import ASSUMED, Prices
from twinpool.simulate.cache import Cache
from twinpool.simulate.clock import Clock
from twinpool.simulate.engines import DecodeWorker, Job, PrefillWorker
from twinpool.simulate.fleet import Fleet, Life, Loss
from twinpool.simulate.pool import Pool, Setup, play
from twinpool.simulate.traces import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.operator.logic.scaling import Pair

#: A second for each hundred prompt tokens, a tenth of a second a step, a hundredth for each hundred that are pulled.
PLAIN = Prices(overhead=0.0, weights=0.1, context=0.0, token=0.01, pair=0.0, pull_setup=0.0, pull_token=0.0001)


def fleet(life: Life, told: Callable[[], None] = lambda: None) -> tuple[Clock, Fleet]:
    clock = Clock()
    made = (
        lambda _: PrefillWorker(clock, PLAIN, Cache(0)),
        lambda _: DecodeWorker(clock, PLAIN, 1000, Cache(0)),
    )
    return clock, Fleet(clock, life, made, told)


def test_a_group_serves_after_its_start_and_costs_from_its_order_on() -> None:
    heard: list[Pair] = []
    clock, groups = fleet(Life(60.0, gpus=(2, 1)), lambda: heard.append(groups.serving()))
    groups.begin((1, 1))
    clock.at(100.0, lambda: groups.resize((2, 1), {}))
    clock.run(159.0)
    assert (groups.there(), groups.serving()) == ((2, 1), (1, 1))
    clock.run(161.0)
    assert groups.serving() == (2, 1)
    assert heard == [(1, 1), (2, 1)]
    assert groups.course == [(0.0, (1, 1)), (160.0, (2, 1))]
    assert groups.gpu_hours(200.0) == pytest.approx((200 * 3 + 100 * 2) / 3600)


def test_a_group_that_is_let_go_stays_a_while_and_serves_at_once_when_it_is_missed() -> None:
    clock, groups = fleet(Life(60.0, window=30.0))
    groups.begin((2, 1))
    clock.at(10.0, lambda: groups.resize((1, 1), {"p0": 5}))
    clock.at(30.0, lambda: groups.resize((2, 1), {}))
    clock.run(31.0)
    assert groups.course == [(0.0, (2, 1)), (10.0, (1, 1)), (30.0, (2, 1))]
    clock.at(40.0, lambda: groups.resize((1, 1), {"p1": 5}))
    clock.run(69.5)
    assert len(groups.prefill.members) == 2
    clock.run(72.0)
    assert [member.name for member in groups.prefill.members] == ["p1"], "the other one had nothing to do"
    assert groups.gpu_hours(100.0) == pytest.approx((100 + 100 + 70) / 3600)
    assert groups.gpu_hours(50.0) == pytest.approx(150 / 3600)


def test_a_group_that_has_yet_to_start_goes_first_and_at_once() -> None:
    clock, groups = fleet(Life(60.0))
    groups.begin((1, 1))
    groups.resize((2, 1), {})
    clock.at(5.0, lambda: groups.resize((1, 1), {}))
    clock.run()
    assert groups.course == [(0.0, (1, 1))]
    assert groups.gpu_hours(100.0) == pytest.approx((100 + 100 + 5) / 3600)


def test_what_the_budget_does_not_hold_comes_when_others_have_gone() -> None:
    clock, groups = fleet(Life(10.0, gpus=(1, 1), budget=3, window=500.0))
    groups.begin((2, 1))
    groups.prefill.members[1].engine.held = 1
    groups.resize((1, 2), {"p0": 9})
    assert len(groups.decode.members) == 1, "p1 still holds KV that somebody is to pull"
    clock.at(19.5, lambda: setattr(groups.prefill.members[1].engine, "held", 0))
    clock.run()
    assert groups.course == [(0.0, (2, 1)), (0.0, (1, 1)), (30.0, (1, 2))]


@settings(max_examples=60)
@given(
    targets=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12),
    losses=st.lists(st.tuples(st.integers(1, 300), st.sampled_from(["prefill", "decode"]), st.integers(1, 3))),
    rolls=st.lists(st.floats(1, 300), max_size=3),
    budget=st.integers(2, 9),
)
def test_the_budget_is_never_exceeded_and_numbers_are_reached(
    targets: list[Pair], losses: list[tuple[int, str, int]], rolls: list[float], budget: int
) -> None:
    lost = tuple(Loss(float(at), role, count) for at, role, count in losses)  # type: ignore[arg-type]
    clock, groups = fleet(Life(30.0, lost, (1, 2), budget, 20.0, tuple(rolls)))
    groups.begin((0, 1))

    def held() -> int:
        return len(groups.prefill.members) + 2 * len(groups.decode.members)

    def resize(pair: Pair) -> None:
        if pair[0] + 2 * pair[1] <= budget:
            groups.resize(pair, {})
        assert held() <= budget

    for number, pair in enumerate(targets):
        clock.at(25.0 * number, lambda pair=pair: resize(pair))  # type: ignore[misc]
    for second in range(0, 1500, 5):
        clock.run(float(second))
        assert held() <= budget
    clock.run()
    assert groups.there() == groups.serving() == groups.target
    members = (*groups.prefill.members, *groups.decode.members)
    assert {member.revision for member in members} <= {f"r{len(rolls)}"}
    assert not groups.busy()


def few(count: int, apart: float = 3.0, prompt: int = 200, output: int = 20) -> list[Request]:
    return [Request(apart * number, prompt, output) for number in range(count)]


SETUP = Setup(PLAIN, prefill=2, decode=2, prefill_cache=0, decode_capacity=10_000)


def test_a_lost_decode_group_ends_its_streams_and_what_had_no_token_is_asked_anew() -> None:
    played = play(few(8), replace(SETUP, life=Life(60.0, (Loss(6.5, "decode", 2),))))
    broken = [job for job in played.jobs if math.isinf(job.finish)]
    assert [job.request.arrival for job in broken] == [3.0], "it had its first token at 5.1 s, and was to end at 7 s"
    assert not any(math.isinf(job.first) for job in played.jobs)
    assert played.course[1:] == ((6.5, (2, 0)), (66.5, (2, 1)), (66.5, (2, 2)))


def test_a_lost_prefill_group_costs_its_prompts_a_second_start() -> None:
    trace = few(6, apart=0.1, prompt=400)
    calm = play(trace, SETUP)
    played = play(trace, replace(SETUP, life=Life(5.0, (Loss(1.0, "prefill"),))))
    assert all(job.finish < math.inf for job in played.jobs)
    later = sum(new.first > old.first + 0.5 for new, old in zip(played.jobs, calm.jobs, strict=True))
    assert later >= 3


def test_kv_that_was_not_pulled_when_its_holder_was_lost_is_computed_again() -> None:
    slow = replace(PLAIN, pull_setup=2.0)
    trace = few(2, apart=0.1)
    setup = replace(SETUP, prices=slow, life=Life(1.0, (Loss(3.0, "prefill", 2),)))
    played = play(trace, setup)
    # Computed from 0 to 2 s, pulled until 4 s from nobody; again from 4 s.
    assert [round(job.first, 1) for job in played.jobs] == [8.1, 8.2]


def test_whole_requests_of_a_lost_decode_group_are_asked_anew() -> None:
    cheap = replace(PLAIN, pull_setup=50.0)
    setup = replace(SETUP, prices=cheap, conditional=True, life=Life(3.0, (Loss(1.0, "decode", 2),)))
    played = play([*(Request(0.1 * number, 300, 5) for number in range(4))], setup)
    assert all(job.finish < math.inf for job in played.jobs)
    assert min(job.first for job in played.jobs) == pytest.approx(4.0 + 3.0)


def test_requests_wait_while_a_role_has_no_group_that_serves() -> None:
    setup = replace(SETUP, prefill=1, decode=1, life=Life(30.0, (Loss(2.5, "prefill"), Loss(4.5, "decode"))))
    played = play(few(3, apart=2.0), setup)
    assert played.jobs[0].finish == pytest.approx(2.0 + 0.02 + 2.0), "it was through when its group was lost"
    assert all(job.first > 34.0 for job in played.jobs[1:])
    assert all(job.finish < math.inf for job in played.jobs)


def test_a_prompt_that_nobody_can_write_for_goes_back_to_wait() -> None:
    setup = replace(SETUP, prefill=1, decode=1, life=Life(10.0, (Loss(1.0, "decode"),)))
    played = play(few(1), setup)
    assert played.jobs[0].first == pytest.approx(11.0 + 2.0 + 0.02 + 0.1)


def test_a_decode_group_that_is_lost_lets_go_what_waits_for_its_room() -> None:
    clock = Clock()
    source, worker = PrefillWorker(clock, PLAIN, Cache(0)), DecodeWorker(clock, PLAIN, 150, Cache(0))
    asked: list[str] = []
    for name, prompt, whole in (
        ("pulled", 100, False),
        ("waits", 100, False),
        ("too large", 200, True),
        ("w", 50, True),
    ):
        job = Job(Request(0.0, prompt, 20), again=lambda name=name: asked.append(name))  # type: ignore[misc]
        source.held += not whole
        worker.submit(job, None if whole else source)
    assert (source.busy, worker.busy) == (True, True)
    clock.at(1.0, worker.lose)
    clock.run()
    assert asked == ["waits", "w"], "the first one had its token, and the third never fitted"
    assert not source.busy


def test_a_whole_request_that_was_to_be_read_in_the_next_step_is_asked_anew() -> None:
    clock = Clock()
    worker = DecodeWorker(clock, PLAIN, 500, Cache(0))
    asked: list[float] = []
    worker.submit(Job(Request(0.0, 10, 20)), None)
    clock.at(0.25, lambda: worker.submit(Job(Request(0.25, 10, 20), again=lambda: asked.append(clock.now)), None))
    clock.at(0.26, worker.lose)
    clock.run()
    assert asked == [pytest.approx(0.3)]


def test_a_pull_to_a_lost_decode_group_is_asked_anew_when_it_ends() -> None:
    clock = Clock()
    source, worker = PrefillWorker(clock, PLAIN, Cache(0)), DecodeWorker(clock, PLAIN, 150, Cache(0))
    asked: list[float] = []
    source.held += 1
    worker.submit(Job(Request(0.0, 100, 20), again=lambda: asked.append(clock.now)), source)
    worker.lose()
    clock.run()
    assert asked == [pytest.approx(0.01)]
    assert not source.busy


def test_a_new_revision_replaces_all_groups_in_pairs_and_breaks_no_request() -> None:
    setup = replace(SETUP, life=Life(10.0, rolls=(20.0,)))
    played = play(few(40, apart=2.0), setup)
    assert all(job.finish < math.inf for job in played.jobs)
    assert min(pair for _, pair in played.course) == (2, 2), "maxUnavailable is 0"
    assert max(sum(pair) for _, pair in played.course) <= 6
    assert played.gpu_hours > play(few(40, apart=2.0), SETUP).gpu_hours


def test_kv_goes_over_within_a_revision() -> None:
    clock = Clock()
    pool = Pool(replace(SETUP, life=Life(10.0, rolls=(5.0,))), clock)
    seen: set[tuple[int, int]] = set()
    for second in range(60):
        clock.run(float(second))
        revisions = {member.revision for member in pool.decode}
        assert all(member.revision in revisions for member in pool.prefill)
        seen.add((len(pool.prefill), len(revisions)))
    assert max(count for _, count in seen) == 2, "for a while both revisions serve"
    assert {member.revision for member in (*pool.prefill, *pool.decode)} == {"r1"}


@settings(max_examples=40, deadline=None)
@given(
    losses=st.lists(st.tuples(st.floats(0, 40), st.sampled_from(["prefill", "decode"]), st.integers(1, 2))),
    rolls=st.lists(st.floats(0, 40), max_size=2),
    seed=st.integers(0, 99),
    conditional=st.booleans(),
)
def test_whatever_is_lost_or_replaced_each_request_is_answered_or_was_broken_off(
    losses: list[tuple[float, str, int]], rolls: list[float], seed: int, conditional: bool
) -> None:
    dice = Random(seed)
    trace = [Request(dice.uniform(0, 30), dice.randrange(1, 4000), dice.randrange(1, 200)) for _ in range(60)]
    lost = tuple(Loss(at, role, count) for at, role, count in losses)  # type: ignore[arg-type]
    setup = Setup(
        ASSUMED,
        2,
        2,
        100_000,
        50_000,
        routers=2,
        exchange=0.2,
        conditional=conditional,
        life=Life(5.0, lost, rolls=tuple(rolls)),
    )
    played = play(sorted(trace, key=lambda request: request.arrival), setup)
    assert all(job.first < math.inf for job in played.jobs)
    assert all(job.first <= job.finish for job in played.jobs)
    broken = sum(math.isinf(job.finish) for job in played.jobs)
    assert broken == 0 or any(role == "decode" for _, role, _ in losses)
    assert played.course[-1][1] == (2, 2)
