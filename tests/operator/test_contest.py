"""A hand edit is repaired; a writer that insists is named and left alone for a while."""

from __future__ import annotations

import dataclasses
from typing import Any

from twinpool.operator.logic.actions import Annotate, Apply
from twinpool.operator.logic.contest import PATIENCE, TRUCE, WINDOW, Contest, Repair, contests, recent
from twinpool.operator.logic.observed import read_child
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings
from twinpool.operator.shell.apply import Executor
from twinpool.operator.shell.observe import Memory

KEY = ("team", "demo")


def repairs(*times: float, by: str = "hpa") -> list[Repair]:
    return [Repair("StatefulSet", "g", by, at) for at in times]


def test_only_a_writer_that_insists_is_left_alone() -> None:
    assert not contests(repairs(0.0, 10.0), 11.0)
    assert not contests([*repairs(0.0, 10.0), *repairs(20.0, by="a person")], 21.0)
    assert not contests(repairs(0.0, 10.0, WINDOW + 1), WINDOW + 2)
    assert contests(repairs(0.0, 10.0, 20.0), 21.0) == (Contest("StatefulSet", "g", "hpa", 20.0 + TRUCE),)
    assert not contests(repairs(0.0, 10.0, 20.0), 20.0 + TRUCE)


def test_old_repairs_are_forgotten() -> None:
    assert recent(repairs(0.0, 500.0), 500.0) == tuple(repairs(500.0))


def test_memory_counts_repairs_until_the_pool_is_gone() -> None:
    memory = Memory()
    for repair in repairs(0.0, 10.0, 20.0):
        memory.repaired(KEY, repair)
    assert [found.name for found in memory.contests(KEY, 21.0)] == ["g"]
    memory.forget(KEY)
    assert not memory.contests(KEY, 21.0)


def edited(model_cluster: Any, make_pool: Any) -> Any:
    """Return a cluster in which somebody changed the router's Deployment."""
    cluster = model_cluster(make_pool())
    cluster.settle()
    body = cluster.objects["Deployment", "demo-router"]
    body["spec"]["replicas"] = 5
    managers = [
        {"manager": "twinpool/reconciler", "operation": "Apply", "time": "2026-01-03T00:00:00Z"},
        {"manager": "kubectl-edit", "operation": "Update", "time": "2026-01-01T00:00:00Z"},
        {"manager": "keda", "operation": "Update", "subresource": "scale", "time": "2026-01-02T00:00:00Z"},
        {"manager": "controller", "operation": "Update", "subresource": "status", "time": "2026-01-04T00:00:00Z"},
    ]
    body["metadata"]["managedFields"] = managers
    return cluster


def test_a_change_by_others_is_a_repair_and_knows_its_writer(model_cluster: Any, make_pool: Any) -> None:
    cluster = edited(model_cluster, make_pool)
    (action,) = plan(cluster.observed(), Settings(), cluster.now).actions
    assert isinstance(action, Apply)
    assert (action.name, action.against) == ("demo-router", "keda (subresource scale)")


def test_a_new_spec_is_no_repair_and_a_contested_child_still_gets_it(model_cluster: Any, make_pool: Any) -> None:
    cluster = edited(model_cluster, make_pool)
    left = (Contest("Deployment", "demo-router", "keda", cluster.now + 100),)
    seen = dataclasses.replace(cluster.observed(), contests=left)
    made = plan(seen, Settings(), cluster.now)
    assert not made.actions, "no war of writes"
    (progressing,) = [item for item in made.status["conditions"] if item["type"] == "Progressing"]
    assert (progressing["status"], progressing["reason"]) == ("False", "Contested")
    assert "keda keeps changing Deployment demo-router" in progressing["message"]
    cluster.pool = make_pool({"routing": {"replicas": 2}})
    seen = dataclasses.replace(cluster.observed(), contests=left)
    (action,) = plan(seen, Settings(), cluster.now).actions
    assert isinstance(action, Apply)
    assert action.against is None


def test_a_writer_without_a_name() -> None:
    assert Contest("Role", "r", "", 0.0).words().startswith("somebody keeps changing Role r")
    child = read_child("Role", {"metadata": {"name": "r"}})
    assert child.writer == ""


class Server:
    def __init__(self) -> None:
        self.merged: list[tuple[str, str, Any]] = []

    async def apply(self, body: Any) -> Any:
        return {**body, "metadata": {**body["metadata"]}}

    async def merge(self, kind: str, namespace: str, name: str, body: Any) -> Any:
        self.merged.append((kind, name, body))
        return body


class Leader:
    valid = True


async def test_the_shell_counts_repairs_and_names_leaders(model_cluster: Any, make_pool: Any) -> None:
    cluster, server, memory = edited(model_cluster, make_pool), Server(), Memory()
    executor = Executor(server, Leader(), memory, clock=lambda: 5.0)  # type: ignore[arg-type]
    made = plan(cluster.observed(), Settings(), cluster.now)
    for _ in range(PATIENCE):
        assert await executor.execute(KEY, made.actions) == ()
    (contest,) = memory.contests(KEY, 6.0)
    assert (contest.name, contest.by) == ("demo-router", "keda (subresource scale)")
    await executor.execute(KEY, (Annotate("Pod", "p-1", "u", "key", "value"),))
    assert server.merged == [("Pod", "p-1", {"metadata": {"uid": "u", "annotations": {"key": "value"}}})]
    executor.forget(KEY)
