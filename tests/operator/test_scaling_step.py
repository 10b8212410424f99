"""What the autoscaler decides at each look: patience, restarts, zero, missing figures, and no swinging under noise."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.economics import ASSUMED
from twinpool.operator.logic.scaling import Pair, cheapest
from twinpool.operator.logic.scaling_report import Totals, Work
from twinpool.operator.logic.scaling_step import Outcome, Seen, State, advance, demand_of, growth_of
from twinpool.operator.logic.scaling_window import Look, Window, window
from twinpool.operator.logic.target import limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.scaling import Scaling
    from twinpool.core.spec import InferencePool

SPEC = {
    "objectives": {"ttft": "2s", "itl": "50ms"},
    "scaling": {
        "prefill": {"min": 0, "max": 20}, "decode": {"min": 0, "max": 20}, "window": "60s",
        "stabilization": {"scaleIn": "100s", "scaleOut": "4s"},
    },
}  # fmt: skip


class Autoscaler:
    """A pool whose groups are there as soon as they are wanted, looked at every two seconds."""

    def __init__(self, pool: InferencePool, target: Pair = (1, 1)) -> None:
        assert pool.spec.scaling is not None
        self.pool, self.scaling, self.target = pool, pool.spec.scaling, target
        self.state, self.now = State(), 1000.0
        self.groups: Pair | None = None
        self.changes: list[Pair] = []

    def look(self, work: Window | str, start: float = 0.0, **more: Any) -> Outcome:
        seen = Seen(self.target, self.groups or self.target, work, start, **more)
        self.state, outcome = advance(self.state, self.pool, self.scaling, seen, self.now)
        if outcome.pair != self.target:
            self.changes.append(outcome.pair)
        self.target = outcome.pair
        self.now += 2.0
        return outcome

    def looks(self, work: Window | str, seconds: float) -> Outcome:
        for _ in range(int(seconds / 2)):
            outcome = self.look(work)
        return outcome


def arriving(rate: float = 20.0, prompt: int = 4000, output: int = 300, **more: Any) -> Window:
    seconds = 60.0
    requests, each = rate * seconds, ASSUMED.prefill(prompt, 0)
    totals = Totals(
        requests=requests, prompt_tokens=requests * prompt, output_tokens=requests * output,
        prefill=requests * each, prefill_squared=requests * each * each * 1.5,
        streams=requests, streamed_tokens=requests * output,
    )  # fmt: skip
    return replace(Window(seconds, totals), **more)


IDLE = Window(60.0, Totals())


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., InferencePool]) -> InferencePool:
    return make_pool(SPEC)


def test_more_work_brings_groups_once_it_lasted_and_less_work_takes_them_after_long(pool: InferencePool) -> None:
    ours = Autoscaler(pool)
    assert ours.look(arriving()).pair == (1, 1), "one look is not enough"
    ours.looks(arriving(), 10)
    high = ours.target
    assert high[0] > 2
    ours.looks(arriving(1.0), 98)
    assert ours.target == high
    ours.looks(arriving(1.0), 10)
    assert ours.target < high
    assert len(ours.changes) == 2, "both numbers in one step, each way"


def test_a_peak_shorter_than_the_patience_brings_nothing(pool: InferencePool) -> None:
    ours = Autoscaler(pool)
    ours.looks(arriving(1.0), 20)
    ours.look(arriving(40.0))
    ours.looks(arriving(1.0), 20)
    assert ours.changes == []


def test_what_jumped_once_finds_groups_when_it_jumps_again(pool: InferencePool) -> None:
    def played(*rates: tuple[float, int]) -> Pair:
        ours = Autoscaler(pool)
        for rate, seconds in rates:
            for _ in range(seconds // 2):
                ours.look(arriving(rate), start=60.0)
        return ours.target

    calm, jumped = played((8.0, 700)), played((8.0, 200), (20.0, 120), (8.0, 380))
    assert sum(jumped) > sum(calm)
    assert jumped <= played((20.0, 700)), "no more than the jump itself needs, but for a little"
    assert sum(played((8.0, 200), (20.0, 120), (8.0, 4000))) < sum(jumped), "an hour later it is forgotten"


def test_groups_that_were_lost_are_worth_a_spare_as_long_as_starts_are_long(pool: InferencePool) -> None:
    ours = Autoscaler(pool)
    ours.looks(arriving(), 200)
    needed = ours.target
    for lost, served in ((False, needed), (True, (needed[0] // 2, needed[1]))):
        outcome = ours.look(arriving(), 900.0, serving=served)
        assert ("2 prefill more, since groups were lost lately" in outcome.words) == lost
    assert ours.looks(arriving(), 200).pair == needed, "at once there is another one: starts take no time here"


def test_missing_figures_hold_and_say_why_and_start_the_patience_anew(pool: InferencePool) -> None:
    ours = Autoscaler(pool, (9, 9))
    held = ours.looks("router pod r does not say what arrives", 600)
    assert (held.pair, held.reason, held.active) == ((9, 9), "NoFigures", False)
    assert "router pod r does not say" in held.message
    ours.looks(IDLE, 90)
    ours.look("a gap")
    ours.looks(IDLE, 98)
    assert ours.target == (9, 9), "the patience began anew with the gap, as with a restart"
    ours.looks(IDLE, 10)
    assert ours.target == (0, 0)


@given(rates=st.lists(st.none() | st.floats(0, 60), min_size=1, max_size=30))
def test_whatever_is_missing_never_takes_a_group_away(rates: list[float | None], pool: InferencePool) -> None:
    ours = Autoscaler(pool, (3, 3))
    for rate in rates:
        before = ours.target
        outcome = ours.look("missing" if rate is None else arriving(rate) if rate else IDLE)
        if rate is None:
            assert outcome.pair == before
        assert min(outcome.pair) >= 3, "nor does anything else, before the patience is over"


def test_nobody_for_long_scales_to_zero_and_whoever_waits_brings_one_of_each_at_once(pool: InferencePool) -> None:
    ours = Autoscaler(pool, (2, 3))
    ours.looks(IDLE, 200)
    assert ours.target == (0, 0)
    woken = ours.look(Window(60.0, Totals(), waiting=1))
    assert (woken.pair, woken.reason) == ((1, 1), "FromZero")
    ours.looks(Window(60.0, Totals(), waiting=1), 300)
    assert ours.target == (1, 1), "as long as somebody waits"
    ours.looks(Window(60.0, Totals(), decoding=0.5), 300)
    assert ours.target[1] == 1, "and as long as an answer is written"


def test_decode_groups_with_little_room_for_kv_are_more(pool: InferencePool) -> None:
    known, unknown = Autoscaler(pool), Autoscaler(pool)
    # Sixteen sequences of 4300 tokens fit; by time and number of sequences many more would.
    known.looks(arriving(kv_tokens=16 * 4300), 60)
    unknown.looks(arriving(), 60)
    assert known.target[1] > unknown.target[1] >= 1
    assert known.target[0] == unknown.target[0]


def test_at_most_nothing_is_nothing(make_pool: Callable[..., InferencePool]) -> None:
    bound = {**SPEC["scaling"], "gpuBudget": 1}
    ours = Autoscaler(make_pool({**SPEC, "scaling": bound}), (0, 0))
    assert sum(ours.look(Window(60.0, Totals(), waiting=1)).pair) <= 1


def test_while_groups_are_yet_to_be_made_numbers_only_fall(pool: InferencePool) -> None:
    ours = Autoscaler(pool, (2, 2))
    ours.groups = (1, 2)
    stays = ours.looks(arriving(40.0), 30)
    assert (stays.pair, stays.reason) == ((2, 2), "Changing")
    ours.looks(arriving(0.5), 220)
    assert ours.target <= (1, 2)


def test_pending_groups_count(pool: InferencePool) -> None:
    """A group that waits for a node exists: nothing more is ordered for the same need."""
    ours = Autoscaler(pool)
    ours.looks(arriving(), 300)
    assert len(ours.changes) == 1


def test_limits_and_objectives_out_of_reach_are_named(make_pool: Callable[..., InferencePool]) -> None:
    small = {**SPEC["scaling"], "prefill": {"min": 1, "max": 2}, "decode": {"min": 1, "max": 2}}
    limited = Autoscaler(make_pool({**SPEC, "scaling": small})).looks(arriving(60.0), 30)
    assert (limited.reason, limited.pair[0], limited.active) == ("Limited", 2, True)
    strict = Autoscaler(make_pool({**SPEC, "objectives": {"ttft": "10ms", "itl": "50ms"}})).looks(arriving(), 30)
    assert (strict.reason, strict.pair[0]) == ("ObjectiveOutOfReach", 1)
    loose = Autoscaler(make_pool({"scaling": SPEC["scaling"]})).looks(arriving(1.0), 30)
    assert loose.reason == "Following"


def test_an_edit_of_the_limits_counts_at_once_even_without_figures(make_pool: Callable[..., InferencePool]) -> None:
    spec = {**SPEC, "scaling": {**SPEC["scaling"], "decode": {"min": 0, "max": 2}}}
    assert Autoscaler(make_pool(spec), (3, 5)).look("missing").pair == (2, 2), "as much of both"


def test_slower_engines_need_more_groups_and_what_was_learnt_is_kept(pool: InferencePool) -> None:
    work = arriving(5.0)
    timed = work.totals._replace(
        prefills=10, prefill_log=10 * math.log(4), steps=10, step_log=10 * math.log(2),
        answered_tokens=100, cached_tokens=25,
    )  # fmt: skip
    normal, slow = Autoscaler(pool), Autoscaler(pool)
    normal.looks(work, 20)
    found = slow.looks(replace(work, totals=timed), 20)
    assert slow.target[0] > normal.target[0]
    assert found.figures is not None
    assert found.figures.prefill_factor == pytest.approx(4)
    assert found.figures.step_factor == pytest.approx(2)
    assert found.figures.hit_rate == 0.25
    later = slow.look(work)
    assert later.figures is not None
    assert later.figures.prefill_factor == pytest.approx(4)


def test_a_backlog_and_growth_until_a_group_is_up_need_more(pool: InferencePool) -> None:
    calm = Autoscaler(pool)
    calm.looks(arriving(), 20)
    behind, grows = Autoscaler(pool), Autoscaler(pool)
    behind.looks(arriving(prefill=400.0), 20)
    assert behind.target[0] > calm.target[0]
    for _ in range(10):
        grows.look(arriving(slope=0.1), start=180.0)
    assert grows.target[0] > calm.target[0]
    assert growth_of(arriving(slope=10.0), 180.0) == 3.0
    assert growth_of(IDLE, 180.0) == 1.0


def test_work_in_service_is_no_backlog() -> None:
    busy = arriving(20.0)
    erlangs = busy.totals.prefill / busy.seconds
    mean = busy.totals.prefill / busy.totals.requests
    assert demand_of(replace(busy, prefill=erlangs * mean), State()).backlog == 0.0
    assert demand_of(replace(busy, waiting=10), State()).backlog == pytest.approx(10 * mean)
    free = Totals(requests=10.0)
    assert demand_of(Window(10.0, free), State()).prefill == 0.0


def test_how_many_sequences_an_engine_runs_is_read_from_its_arguments(make_pool: Callable[..., InferencePool]) -> None:
    def decode(*args: str) -> int:
        ours = Autoscaler(make_pool({**SPEC, "engine": {"args": args}}))
        ours.looks(arriving(4.0, prompt=500, output=1000), 20)
        return ours.target[1]

    few = decode("--max-num-seqs=2")
    assert few > decode() == decode("--max-num-seqs", "many")
    assert decode("--max-num-seqs", "2") == few


def test_what_is_missed_comes_back_at_once_and_stays_as_long_as_ever(pool: InferencePool) -> None:
    ours = Autoscaler(pool, (6, 4))
    ours.looks(arriving(1.0), 110)
    before, low = (6, 4), ours.target
    assert low < before
    calm = ours.look(arriving(1.0), before=before)
    assert calm.reason == "Following"
    missed = ours.look(arriving(1.0, prefill=400.0), before=before)
    assert (missed.reason, missed.pair) == ("PutBack", (6, low[1])), "the role that suffers alone"
    assert "s of prefill wait for" in missed.words
    ours.looks(arriving(1.0), 90)
    assert ours.target[0] == 6
    ours.looks(arriving(1.0), 20)
    assert ours.target[0] < 6
    late = ours.look(arriving(1.0, decoding=9000.0), before=(1, 9))
    assert (late.reason, late.pair[1]) == ("PutBack", 9)
    assert "sequences are written by" in late.words


def test_groups_that_take_too_long_to_start_have_others_in_their_place(pool: InferencePool) -> None:
    whole = Autoscaler(pool)
    whole.looks(arriving(), 20)
    need = whole.target
    slow = Autoscaler(pool, need)
    slow.looks(arriving(), 10)
    found = slow.look(arriving(), late=(1, 0))
    assert found.pair == (need[0] + 1, need[1])
    assert "1 prefill groups take longer to start" in found.words
    for _ in range(40):
        found = slow.look(arriving(), late=found.pair)
    assert found.pair[0] <= need[0] + 1, "groups that never start bring no more than one"


def test_a_slow_rise_is_seen_over_as_long_as_a_group_takes_to_start(pool: InferencePool) -> None:
    steady, rising = Autoscaler(pool), Autoscaler(pool)
    for step in range(150):
        steady.look(arriving(20.0), start=180.0)
        rising.look(arriving(10.0 + step / 15), start=180.0)
    assert rising.target[0] > steady.target[0]


def test_prompts_that_decode_workers_compute_while_prefill_is_short_ask_for_no_decode(pool: InferencePool) -> None:
    short, writing = Autoscaler(pool, (2, 2)), Autoscaler(pool, (2, 2))
    short.looks(arriving(2.0, prefill=400.0, decoding=900.0), 10)
    writing.looks(arriving(2.0, decoding=900.0), 10)
    assert short.target[1] == 2 < writing.target[1]


def test_a_backlog_that_will_be_gone_when_a_group_is_up_asks_for_none(pool: InferencePool) -> None:
    gone, stays = Autoscaler(pool, (6, 3)), Autoscaler(pool, (6, 3))
    for _ in range(10):
        gone.look(arriving(prefill=400.0), start=180.0)
        stays.look(arriving(prefill=4000.0), start=180.0)
    assert gone.target[0] <= 6 < stays.target[0]


@pytest.mark.parametrize("rate", [2.0, 12.0])
def test_constant_load_with_noise_moves_nothing_for_half_an_hour(pool: InferencePool, rate: float) -> None:
    dice, ours = random.Random(5), Autoscaler(pool)
    total, looks = Totals(), []
    for second in range(1800):
        came = sum(dice.random() < rate / 100 for _ in range(100))
        for _ in range(came):
            prompt = max(50, int(dice.expovariate(1 / 3000)))
            each = ASSUMED.prefill(prompt, 0)
            total = total.plus(Totals(
                requests=1, prompt_tokens=prompt, prefill=each, prefill_squared=each * each,
                streams=1, streamed_tokens=200,
            ))  # fmt: skip
        looks = [*looks[-80:], Look(float(second), {"r": Work(total)})]
        if second % 2 == 0:
            ours.now = float(second)
            ours.look(window(looks, ["r"], float(second), 60.0))
    assert len(ours.changes) <= 6, ours.changes
    for before, after in pairwise(ours.changes):
        assert abs(before[0] - after[0]) + abs(before[1] - after[1]) <= 2, ours.changes


pairs = st.tuples(st.integers(0, 12), st.integers(0, 12))


@given(target=pairs, budget=st.integers(1, 40), rate=st.floats(0.1, 60), prompt=st.integers(50, 20_000))
def test_no_decision_is_beyond_budget_or_bounds(
    target: Pair, budget: int, rate: float, prompt: int, make_pool: Callable[..., InferencePool]
) -> None:
    found = make_pool({**SPEC, "scaling": {**SPEC["scaling"], "gpuBudget": budget}})
    scaling: Scaling | None = found.spec.scaling
    assert scaling is not None
    ours = Autoscaler(found, target)
    for work in (arriving(rate, prompt), "missing", IDLE):
        for _ in range(4):
            pair = ours.look(work).pair
            assert sum(pair) <= budget
            assert pair == cheapest(pair, limits(found, scaling))
