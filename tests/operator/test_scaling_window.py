"""From routers' reports to arriving work: whatever routers do in between, and only from figures that are there."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from twinpool.operator.logic.scaling_report import Totals, Work, read_work
from twinpool.operator.logic.scaling_window import MOST, STALE, Look, Window, remembered, window


def work(requests: float, **more: Any) -> Work:
    totals = Totals(requests=requests, prefill=requests * 0.1, prefill_squared=requests * 0.01)
    return Work(totals, **more)


def steady(rate: float, until: int, name: str = "r") -> list[Look]:
    return [Look(float(t), {name: work(rate * t)}) for t in range(until + 1)]


def known(found: Window | str) -> Window:
    assert isinstance(found, Window)
    return found


@pytest.mark.parametrize(
    "document",
    [None, [], {}, {"current": False, "arrivals": {}}, {"current": True}, {"current": True, "arrivals": 3}],
)
def test_what_is_no_report_is_none(document: Any) -> None:
    assert read_work(document) is None


def test_a_report_is_read_without_trust() -> None:
    arrivals = {"requests": 3, "prefill": math.nan, "step_log": -2.5, "steps": "many", "streams": 1e30}
    now = {"current": True, "waiting": 2, "prefillSeconds": 1.5, "decoding": None, "kvTokens": -4}
    found = read_work({**now, "arrivals": arrivals})
    assert found == Work(Totals(requests=3.0, step_log=-2.5), waiting=2, prefill=1.5, decoding=0, kv_tokens=0)


def test_the_rate_is_what_came_within_the_window_over_all_routers() -> None:
    looks = [Look(float(t), {"r": work(2.0 * t), "s": work(1000 + 3.0 * t)}) for t in range(101)]
    found = known(window(looks, ["r", "s"], 100.0, 60.0))
    assert found.totals.requests / found.seconds == pytest.approx(5.0)
    assert found.totals.prefill == pytest.approx(0.1 * found.totals.requests)
    assert (found.slope, found.asked) == (0.0, True)
    assert not known(window(steady(0.0, 100), ["r"], 100.0, 60.0)).asked


def test_routers_that_restart_join_or_are_silent_for_a_moment_change_nothing() -> None:
    looks = steady(2.0, 100)
    anew = [*looks[:80], *(Look(look.at, {"r": work(2.0 * (look.at - 80))}) for look in looks[80:])]
    assert known(window(anew, ["r"], 100.0, 60.0)).totals.requests == pytest.approx(120, abs=2)
    silent = [look for look in looks if not 70 < look.at < 78]
    gaps = [Look(look.at, look.work if not 70 < look.at < 78 else {}) for look in looks]
    for seen in (silent, gaps):
        assert known(window(seen, ["r"], 100.0, 60.0)).totals.requests == pytest.approx(120)
    joined = [Look(look.at, look.work | ({"s": work(500 + look.at)} if look.at > 90 else {})) for look in looks]
    assert known(window(joined, ["r", "s"], 100.0, 60.0)).totals.requests == pytest.approx(120 + 9)


def test_without_figures_it_says_why() -> None:
    looks = steady(2.0, 100)
    assert "no router pod is ready" in str(window(looks, [], 100.0, 60.0))
    assert "router pod s does not say" in str(window(looks, ["r", "s"], 100.0, 60.0))
    assert "router pod r does not say" in str(window(looks, ["r"], 101.0 + STALE, 60.0))
    assert "just begun" in str(window(looks[:10], ["r"], 9.0, 60.0))
    assert "just begun" in str(window(looks[:1], ["r"], 0.0, 60.0))
    assert isinstance(window(looks[:20], ["r"], 19.0, 60.0), Window)


def test_two_looks_are_enough_for_a_rate_and_say_nothing_of_growth() -> None:
    found = known(window([Look(0.0, {"r": work(0)}), Look(30.0, {"r": work(60)})], ["r"], 30.0, 60.0))
    assert (found.totals.requests / found.seconds, found.slope) == (2.0, 0.0)


def test_growth_that_chance_would_not_make_counts_with_its_slope() -> None:
    def grown(more: float, now: int = 100) -> Window:
        looks = [Look(float(t), {"r": work(2.0 * t + more * max(0, t - 70))}) for t in range(now + 1)]
        return known(window(looks, ["r"], float(now), 60.0))

    assert grown(0.1).slope == 0.0
    assert grown(0.1).totals.requests / grown(0.1).seconds == pytest.approx(2.05, rel=0.05)
    looks = [Look(float(t), {"r": work(2.0 * t + 0.15 * max(0, t - 60) ** 2)}) for t in range(101)]
    sharp = known(window(looks, ["r"], 100.0, 60.0))
    assert sharp.slope == pytest.approx(0.3 * 25 / 30, rel=0.1)
    assert sharp.totals.requests / sharp.seconds == pytest.approx(9.5, rel=0.05), "the newer half is what goes on"


@pytest.mark.parametrize("since", [70, 92, 97])
def test_a_step_is_no_rise_and_its_rate_is_what_came_since(since: int) -> None:
    looks = [Look(float(t), {"r": work(2.0 * t + 18.0 * max(0, t - since))}) for t in range(101)]
    found = known(window(looks, ["r"], 100.0, 60.0))
    assert found.slope == 0.0
    assert found.seconds == max(10, 100 - since), "a mean takes some seconds"
    assert found.totals.requests / found.seconds == pytest.approx(2 + 18 * min(1.0, (100 - since) / 10), rel=0.05)


def test_longer_prompts_at_the_same_rate_count_at_once() -> None:
    def totals(t: int) -> Totals:
        long = max(0, t - 70)
        return Totals(requests=2.0 * t, prefill=0.1 * (2 * t) + 2.0 * long, prefill_squared=0.02 * t + 2.0 * long)

    looks = [Look(float(t), {"r": Work(totals(t))}) for t in range(101)]
    found = known(window(looks, ["r"], 100.0, 60.0))
    assert found.totals.prefill / found.seconds == pytest.approx(2.2, rel=0.05)
    assert found.slope == 0.0


def test_bursts_show_and_chance_does_not() -> None:
    dice = random.Random(3)

    def series(batch: int) -> list[Look]:
        total, looks = 0.0, []
        for t in range(121):
            total += sum(batch for _ in range(20) if dice.random() < 0.1)
            looks.append(Look(float(t), {"r": work(total)}))
        return looks

    assert known(window(series(1), ["r"], 120.0, 100.0)).dispersion == pytest.approx(1.0, abs=0.3)
    assert known(window(series(10), ["r"], 120.0, 100.0)).dispersion > 3
    assert known(window(steady(2.0, 3), ["r"], 3.0, 2.0)).dispersion == 1.0


def test_the_room_for_kv_is_the_least_that_a_router_knows_of() -> None:
    rooms = {"a": 0, "b": 70_000, "c": 60_000}
    looks = [Look(float(t), {name: work(2.0 * t, kv_tokens=room) for name, room in rooms.items()}) for t in range(11)]
    assert known(window(looks, rooms, 10.0, 4.0)).kv_tokens == 60_000
    assert known(window(steady(2.0, 10), ["r"], 10.0, 4.0)).kv_tokens == 0


def test_what_waits_is_that_of_the_last_look_and_what_is_written_the_mean() -> None:
    looks = [Look(float(t), {"r": work(2.0 * t, waiting=t, prefill=float(t), decoding=t)}) for t in range(11)]
    found = known(window(looks, ["r"], 10.0, 4.0))
    assert (found.waiting, found.prefill, found.decoding) == (10, 10.0, 8.5)


def test_old_looks_are_forgotten_and_their_number_is_bounded() -> None:
    looks: tuple[Look, ...] = ()
    for t in range(1000):
        looks = remembered(looks, Look(float(t), {}), 60.0)
    assert looks[0].at == 999 - 60 - STALE
    for t in range(1000):
        looks = remembered(looks, Look(1000 + t / 100, {}), 60.0)
    assert len(looks) == MOST
