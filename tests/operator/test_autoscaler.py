"""From decisions to the pool: the target in its status, the groups that follow it, and the GPU budget on the way."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.core import protocol
from twinpool.core.scaling import MAX_DECISIONS
from twinpool.operator.logic.actions import WriteScaling
from twinpool.operator.logic.autoscaler import REFRESH, TICK, scaled
from twinpool.operator.logic.figures import figures
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.observed import Observed, PodView, timestamp
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.ratio import wanted
from twinpool.operator.logic.scaling_report import Totals, Work
from twinpool.operator.logic.scaling_step import State
from twinpool.operator.logic.scaling_window import Look
from twinpool.operator.logic.settings import Settings
from twinpool.operator.logic.units import bounds
from twinpool.operator.shell import questions as shell
from twinpool.operator.shell.autoscaler import Autoscaler
from twinpool.operator.shell.journal import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from twinpool.core.spec import InferencePool

KEY = ("team", "demo")
SCALING: dict[str, Any] = {"prefill": {"min": 0, "max": 8}, "decode": {"min": 0, "max": 8}, "window": "10s"}
OBJECTIVES = {"ttft": "2s", "itl": "50ms"}
ROUTER = PodView("r", "router", address="127.0.0.1", phase="Running", ready=True)


def elastic(make_pool: Callable[..., InferencePool], **more: Any) -> InferencePool:
    return make_pool({"objectives": OBJECTIVES, "scaling": {**SCALING, **more}})


def idle(now: float, seconds: int = 20) -> list[Look]:
    return [Look(now - seconds + t, {"r": Work(Totals())}) for t in range(seconds + 1)]


def stored(pool: InferencePool, status: Any) -> InferencePool:
    return type(pool).model_validate({"metadata": pool.metadata, "spec": pool.spec, "status": {"scaling": status}})


def test_a_pool_without_scaling_is_left_alone(make_pool: Callable[..., InferencePool]) -> None:
    observed = Observed(make_pool())
    assert scaled(observed, State(since=1.0), (), 0.0) == (observed, State())


def test_a_lost_status_starts_again_from_the_groups_that_exist(
    make_pool: Callable[..., InferencePool], model_cluster: Any
) -> None:
    cluster = model_cluster(make_pool({"prefill": {"replicas": 2}, "decode": {"replicas": 5}}))
    cluster.settle()
    cluster.pool = elastic(make_pool)
    found, _ = scaled(cluster.observed(), State(), (), cluster.now)
    assert wanted(found.pool) == {"prefill": 2, "decode": 5}
    assert fingerprint(found) != fingerprint(cluster.observed()), "equal fingerprints must have given equal plans"
    assert found.scaling is not None
    assert (found.scaling.outcome.reason, found.scaling.changes) == ("NoFigures", False)
    (write,) = [action for action in plan(found, Settings(), cluster.now).actions if isinstance(action, WriteScaling)]
    assert write.scaling is not None
    assert write.scaling["target"] == {"prefill": 2, "decode": 5}
    cluster.carry_out(write)
    again, _ = scaled(cluster.observed(), State(), (), cluster.now)
    assert again.scaling is not None
    assert again.scaling.write is None, "it is stored"


def test_without_any_group_the_numbers_of_the_spec_are_the_first_ones(make_pool: Callable[..., InferencePool]) -> None:
    pool = make_pool({"objectives": OBJECTIVES, "scaling": SCALING, "decode": {"replicas": 20}})
    found, _ = scaled(Observed(pool), State(), (), 0.0)
    assert wanted(found.pool) == {"prefill": 1, "decode": 8}
    assert wanted(pool) == {"prefill": 1, "decode": 8}, "also where nobody decides"


def test_a_change_is_written_with_its_reason_and_the_last_ones_are_kept(
    make_pool: Callable[..., InferencePool],
) -> None:
    now, pool, state = 1000.0, elastic(make_pool), State()
    for n in range(MAX_DECISIONS + 3):
        target = {"prefill": n % 2, "decode": n % 2}
        status = {"target": target, "time": "1970-01-01T00:00:00Z"}
        if pool.status.scaling is not None:
            status["decisions"] = pool.status.scaling.decisions
        pool = stored(pool, status)
        waiting = Work(Totals(), waiting=1 - n % 2)
        looks = [*idle(now)[:-1], Look(now, {"r": waiting})]
        patient = dataclasses.replace(state, since=0.0)
        found, _ = scaled(Observed(pool, pods=(ROUTER,)), patient, looks, now)
        assert found.scaling is not None
        if n % 2 == 0:
            assert found.scaling.changes
            assert found.scaling.write is not None
            newest = found.scaling.write["decisions"][0]
            assert (newest["before"], newest["after"]) == (target, {"prefill": 1, "decode": 1})
            assert "1 requests wait" in newest["reason"]
            pool = stored(pool, found.scaling.write)
    assert pool.status.scaling is not None
    assert len(pool.status.scaling.decisions) == (MAX_DECISIONS + 3 + 1) // 2


def test_what_was_let_go_lately_is_put_back_when_it_is_missed(make_pool: Callable[..., InferencePool]) -> None:
    now = 1000.0

    def decided(before: tuple[int, int], age: float, backlog: float) -> str:
        change = {
            "time": timestamp(now - age), "reason": "", "after": {"prefill": 1, "decode": 1},
            "before": {"prefill": before[0], "decode": before[1]},
        }  # fmt: skip
        status = {"target": {"prefill": 1, "decode": 1}, "time": timestamp(now), "decisions": [change]}
        looks = [Look(now - 20 + t, {"r": Work(Totals(t, 100 * t), prefill=backlog)}) for t in range(21)]
        found, _ = scaled(Observed(stored(elastic(make_pool), status), pods=(ROUTER,)), State(), looks, now)
        assert found.scaling is not None
        return found.scaling.outcome.reason

    assert decided((3, 1), 5.0, backlog=90.0) == "PutBack"
    assert decided((3, 1), 5.0, backlog=0.0) != "PutBack"
    assert decided((3, 1), 15.0, backlog=90.0) != "PutBack", "it is too long ago"
    assert decided((1, 0), 5.0, backlog=90.0) != "PutBack", "nothing was let go"


def test_figures_are_written_again_when_they_are_old(make_pool: Callable[..., InferencePool]) -> None:
    now = 1000.0
    pool = stored(elastic(make_pool), {"target": {"prefill": 1, "decode": 1}, "time": "1970-01-01T00:16:40Z"})
    observed = Observed(pool, pods=(ROUTER,))
    soon, _ = scaled(observed, State(), idle(now + 5), now + 5)
    later, _ = scaled(observed, State(), idle(now + REFRESH), now + REFRESH)
    blind, _ = scaled(observed, State(), (), now + REFRESH)
    assert soon.scaling
    assert later.scaling
    assert blind.scaling
    assert (soon.scaling.write, blind.scaling.write) == (None, None)
    assert later.scaling.write is not None
    assert later.scaling.write["figures"]["requestsPerSecond"] == 0
    assert not later.scaling.changes


def test_what_the_last_operator_learnt_of_the_engines_is_not_lost(make_pool: Callable[..., InferencePool]) -> None:
    now = 1000.0
    fresh, first = scaled(Observed(elastic(make_pool), pods=(ROUTER,)), State(), idle(now), now)
    assert fresh.scaling is not None
    assert fresh.scaling.write is not None
    assert first.prefill_factor == 1.0
    status = dict(fresh.scaling.write)
    status["figures"] = {**status["figures"], "prefillFactor": 9.5, "stepFactor": 3.5}
    pool = stored(elastic(make_pool), status)
    _, state = scaled(Observed(pool, pods=(ROUTER,)), State(), idle(now), now)
    assert (state.prefill_factor, state.step_factor) == (9.5, 3.5)


def test_the_condition_says_whether_numbers_follow_and_the_pool_is_looked_at_again_soon(
    make_pool: Callable[..., InferencePool],
) -> None:
    now = 1000.0
    found, _ = scaled(Observed(elastic(make_pool), pods=(ROUTER,)), State(), idle(now), now)
    made = plan(found, Settings(), now)
    (condition,) = [item for item in made.status["conditions"] if item["type"] == "ScalingActive"]
    assert (condition["status"], condition["reason"]) == ("True", "Changing")
    assert made.requeue_after is not None
    assert made.requeue_after <= TICK + 1
    blind, _ = scaled(Observed(elastic(make_pool)), State(), idle(now), now)
    (condition,) = [i for i in plan(blind, Settings(), now).status["conditions"] if i["type"] == "ScalingActive"]
    assert (condition["status"], condition["reason"]) == ("False", "NoFigures")


def test_a_pool_scaled_to_zero_says_what_brings_it_back(make_pool: Callable[..., InferencePool]) -> None:
    pool = stored(elastic(make_pool), {"target": {"prefill": 0, "decode": 0}, "time": "1970-01-01T00:00:00Z"})
    found, _ = scaled(Observed(pool), State(), (), 1.0)
    (ready,) = [item for item in plan(found, Settings(), 1.0).status["conditions"] if item["type"] == "Routable"]
    assert ready["reason"] == "ScaledToZero"
    assert "next request" in ready["message"]


def test_without_the_block_the_target_is_taken_away(make_pool: Callable[..., InferencePool]) -> None:
    pool = stored(make_pool(), {"target": {"prefill": 4, "decode": 4}, "time": "1970-01-01T00:00:00Z"})
    assert wanted(pool) == {"prefill": 1, "decode": 1}
    (write,) = [a for a in plan(Observed(pool), Settings(), 1.0).actions if isinstance(a, WriteScaling)]
    assert write.scaling is None


def test_the_ratio_band_holds_for_the_target_too(make_pool: Callable[..., InferencePool]) -> None:
    pool = make_pool({"objectives": OBJECTIVES, "scaling": SCALING, "ratio": {"min": "1:2", "max": "1:1"}})
    pool = stored(pool, {"target": {"prefill": 1, "decode": 6}, "time": "1970-01-01T00:00:00Z"})
    assert wanted(pool) == {"prefill": 3, "decode": 6}


def test_a_surge_takes_only_what_the_budget_leaves(make_pool: Callable[..., InferencePool]) -> None:
    def surges(budget: int) -> list[tuple[int, int]]:
        pool = stored(
            elastic(make_pool, gpuBudget=budget),
            {"target": {"prefill": 2, "decode": 2}, "time": "1970-01-01T00:00:00Z"},
        )
        return [(found.surge, found.unavailable) for found in bounds(pool).values()]

    assert surges(6) == [(1, 0), (1, 0)]
    assert surges(5) == [(1, 0), (0, 1)]
    assert surges(4) == [(0, 1), (0, 1)]


targets = st.tuples(st.integers(0, 6), st.integers(0, 6))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("target"), targets),
        st.tuples(st.just("reconcile"), st.none() | st.integers(0, 4)),
        st.tuples(st.sampled_from(["controllers", "end", "ready", "unready", "later", "roll"]), st.none()),
    ),
    max_size=60,
)


@given(first=targets, steps=steps, budget=st.integers(2, 8), tensor=st.sampled_from([1, 2]))
@settings(max_examples=60)
def test_no_interleaving_holds_more_gpus_than_the_budget(
    first: tuple[int, int],
    steps: list[tuple[str, Any]],
    budget: int,
    tensor: int,
    make_pool: Callable[..., InferencePool],
    model_cluster: Any,
) -> None:
    """Groups count from the write that makes them until their last pod has ended, whoever dies in between.

    It begins with groups that serve: only those hold GPUs after they were let go, which is when a budget is at risk.
    """
    size = {"parallelism": {"tensor": tensor}}
    spec = {"objectives": OBJECTIVES, "scaling": {**SCALING, "gpuBudget": budget}, "prefill": size}
    cluster, rolls = model_cluster(make_pool(spec)), 0
    each = {"prefill": tensor, "decode": 1}

    def held() -> int:
        holding = [group for group in groups(cluster.observed()) if not (group.retired and group.gone)]
        return sum(count * each[role] for role, count in Counter(group.role for group in holding).items())

    def aim(pair: tuple[int, int]) -> None:
        status = {"target": {"prefill": pair[0], "decode": pair[1]}, "time": "1970-01-01T00:00:00Z"}
        cluster.pool = stored(cluster.pool, status)

    aim(first)
    cluster.settle()
    for kind, value in steps:
        match kind:
            case "target":
                aim(value)
            case "reconcile":
                cluster.reconcile(upto=value)
            case "controllers":
                cluster.run_controllers()
            case "end":
                cluster.end_pods()
            case "ready" | "unready":
                cluster.set_ready(kind == "ready")
            case "later":
                cluster.now += 400.0
            case _:
                rolls += 1
                status = cluster.pool.status
                cluster.pool = make_pool({**spec, "engine": {"args": [f"--seed={rolls}"]}}).model_copy(
                    update={"status": status}
                )
        assert held() <= budget
    cluster.settle(rounds=120)
    counts = Counter(group.role for group in groups(cluster.observed()) if not group.retired)
    assert dict(counts) == {role: count for role, count in wanted(cluster.pool).items() if count}


async def test_routers_of_pools_that_scale_are_asked_and_decisions_shown(
    make_pool: Callable[..., InferencePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.json_response({"current": True, "arrivals": {"requests": 1}, "waiting": 3})

    application = web.Application()
    application.router.add_get("/admin/work", page)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(protocol, "ROUTER_ADMIN_PORT", runner.addresses[0][1])
    monkeypatch.setattr(shell, "QUICK", 0.01)
    changes: asyncio.Queue[Any] = asyncio.Queue()
    clock = [1000.0]

    def tick() -> float:
        clock[0] += 1.0
        return clock[0]

    ours = Autoscaler(changes.put_nowait, tick)
    ours.work.slow = 0.02
    observed = Observed(elastic(make_pool), pods=(ROUTER,))
    assert ours.look(KEY, observed).scaling is not None
    assert await asyncio.wait_for(changes.get(), 10) == KEY
    async with asyncio.timeout(10):
        while len(ours.work.looks[KEY]) < 6:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.01)
    found = ours.look(KEY, observed)
    assert found.scaling is not None
    assert found.scaling.outcome.active, found.scaling.outcome.message
    shown = [figure for figure in figures(found.pool, {}, found.scaling) if figure.metric == "needed_groups"]
    assert [figure.labels for figure in shown] == [("prefill",), ("decode",)]
    assert not [figure for figure in figures(found.pool, {}) if figure.metric == "needed_groups"]
    plain = Observed(make_pool(), pods=(ROUTER,))
    assert ours.look(KEY, plain) is plain
    ours.look(KEY, observed)
    ours.forget_all()
    assert not ours.work.looks
    await ours.close()
    await runner.cleanup()
