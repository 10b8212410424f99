"""The forecast is what happens when every group behaves; the deadline says when one does not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.operator.logic import progress
from twinpool.operator.logic.forecast import forecast
from twinpool.operator.logic.groups import LOST_AFTER, groups
from twinpool.operator.logic.observed import ContainerView, Observed, Termination
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.rollout import Bounds, Health, State, Unit
from twinpool.operator.logic.settings import Settings
from twinpool.operator.logic.units import health

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]


def start(prefill: int, decode: int, **more: Any) -> State:
    units = [Unit(f"p{n}", "prefill", "old", Health.READY) for n in range(prefill)]
    units += [Unit(f"d{n}", "decode", "old", Health.READY) for n in range(decode)]
    bounds = {"prefill": Bounds(prefill, 1, 0), "decode": Bounds(decode, 1, 0)}
    return dataclasses.replace(State(tuple(units), bounds, "new"), **more)


@given(st.integers(1, 9), st.integers(1, 9))
def test_a_forecast_ends_with_the_newest_revision_alone(prefill: int, decode: int) -> None:
    *_, last = forecast(start(prefill, decode))
    assert last.ready == {("prefill", "new"): prefill, ("decode", "new"): decode}


def test_a_forecast_shows_every_step() -> None:
    stages = list(forecast(start(1, 1)))
    assert [dict(stage.step.create) for stage in stages if any(stage.step.create.values())] == [
        {"prefill": 1, "decode": 1}
    ]
    assert [set(stage.step.retire) for stage in stages if stage.step.retire] == [{"p0", "d0"}]
    assert stages[0].ready["prefill", "new"] == 1


def test_nothing_to_do_is_no_forecast() -> None:
    assert list(forecast(start(0, 0))) == []
    assert list(forecast(start(2, 2, paused=True))) == []


def test_what_starts_and_ends_is_waited_for() -> None:
    units = (Unit("d0", "decode", "new", Health.WAITING), Unit("d1", "decode", "old", Health.LEAVING))
    state = State(units, {"prefill": Bounds(0, 1, 0), "decode": Bounds(1, 1, 0)}, "new")
    assert [dict(stage.ready) for stage in forecast(state)] == [{("decode", "new"): 1}]


def told(cluster: Any, now: float) -> dict[str, str]:
    made = plan(cluster.observed(), Settings(), now)
    return next(item for item in made.status["conditions"] if item["type"] == "Progressing")


def rolling(make_pool: Make, model_cluster: Any, **rollout: Any) -> Any:
    """Return a pool whose new revision was begun at 1000000 and does not become ready."""
    cluster = model_cluster(make_pool(rollout={"progressDeadline": "10m"}))
    cluster.settle()
    edited = make_pool({"engine": {"image": "x"}}, rollout={"progressDeadline": "10m", **rollout})
    cluster.pool = edited.model_copy(update={"status": cluster.pool.status})
    cluster.now = 1_000_000.0
    for _ in range(2):
        cluster.reconcile()
        cluster.run_controllers()
    for body in cluster.objects.values():
        body["metadata"]["creationTimestamp"] = "1970-01-12T13:46:40Z"
    return cluster


def test_a_rollout_that_stands_still_says_so_and_when_to_look(make_pool: Make, model_cluster: Any) -> None:
    cluster = rolling(make_pool, model_cluster)
    assert told(cluster, 1_000_000.0)["reason"] == "Waiting"
    assert plan(cluster.observed(), Settings(), 1_000_000.0).requeue_after == 601.0
    late = told(cluster, 1_000_600.0)
    assert (late["status"], late["reason"]) == ("False", "ProgressDeadlineExceeded")
    assert "nothing went on for 10m" in late["message"]
    assert "maxUnavailable" in late["message"], "what to do where no GPU is spare"
    assert "of 1 decode groups" in late["message"]


def test_a_group_that_becomes_ready_is_progress(make_pool: Make, model_cluster: Any) -> None:
    cluster = rolling(make_pool, model_cluster)
    name = next(name for name, pod in cluster.pods.items() if pod.group and not pod.ready)
    cluster.pods[name] = dataclasses.replace(cluster.pods[name], ready=True, ready_since=1_000_500.0)
    assert told(cluster, 1_000_600.0)["reason"] == "Waiting"
    assert told(cluster, 1_001_100.0)["reason"] == "ProgressDeadlineExceeded"


def test_a_rollout_that_is_done_has_no_deadline(make_pool: Make, model_cluster: Any) -> None:
    cluster = rolling(make_pool, model_cluster)
    cluster.settle()
    assert told(cluster, cluster.now + 1e6)["reason"] == "Complete"
    assert plan(cluster.observed(), Settings(), cluster.now).requeue_after is None


def test_a_failure_is_the_reason_that_is_quoted(make_pool: Make, model_cluster: Any) -> None:
    cluster = rolling(make_pool, model_cluster, maxUnavailable=1)
    name = next(name for name, pod in cluster.pods.items() if pod.group and not pod.ready)
    ended = ContainerView("engine", "x", terminated=Termination("Error", 7, "no such model"))
    cluster.pods[name] = dataclasses.replace(cluster.pods[name], containers=(ended,))
    assert told(cluster, 1_000_000.0)["reason"] == "EngineFailed"
    late = told(cluster, 1_000_700.0)
    assert late["reason"] == "ProgressDeadlineExceeded"
    assert "no such model" in late["message"]
    assert "set rollout.maxSurge" not in late["message"]


def test_a_paused_rollout_says_that_it_is_paused(make_pool: Make, model_cluster: Any) -> None:
    cluster = rolling(make_pool, model_cluster, paused=True)
    said = told(cluster, 1_001_000.0)
    assert (said["status"], said["reason"]) == ("Unknown", "RolloutPaused")


def test_nothing_that_was_seen_gives_no_deadline(make_pool: Make) -> None:
    assert progress.deadline(Observed(make_pool()), (), "new", {"decode": 1}) is None


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"ready": True}, Health.READY),
        ({"ready": False}, Health.WAITING),
        ({"ready": False, "scheduled": False}, Health.FAILED),
        ({"ready": False, "phase": "Failed", "reason": "Evicted"}, Health.FAILED),
        ({"ready": True, "deadline": -LOST_AFTER}, Health.LOST),
    ],
)
def test_what_a_group_is_worth(make_pool: Make, model_cluster: Any, change: dict[str, Any], found: Health) -> None:
    cluster = model_cluster(make_pool(prefill=None))
    cluster.settle()
    observed = cluster.observed()
    pods = tuple(dataclasses.replace(pod, **change) if pod.group else pod for pod in observed.pods)
    (group,) = groups(dataclasses.replace(observed, pods=pods))
    assert health(group, 1.0) is found


def test_a_group_without_pods_has_loaded_nothing(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool(prefill=None))
    cluster.settle()
    (group,) = groups(dataclasses.replace(cluster.observed(), pods=()))
    assert health(group, 1.0) is Health.FAILED
