"""Pods that admission refuses are explained in the controllers' words, with the next step."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from twinpool.operator.logic.admission import complaint, lacking, refused
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.observed import read_child
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings
from twinpool.operator.shell.cluster import ApiRefused
from twinpool.operator.shell.complaints import LATER, SOON, Complaints

KEY = ("team", "demo")
QUOTA = 'create Pod x failed: pods "x" is forbidden: exceeded quota: gpus, requested: 8, used: 8, limited: 8'


def starved(model_cluster: Any, make_pool: Any) -> Any:
    """Return a cluster in which the decode set got no pod."""
    cluster = model_cluster(make_pool())
    cluster.settle()
    cluster.pods = {name: pod for name, pod in cluster.pods.items() if pod.role != "decode"}
    cluster._report()
    return cluster


def complaining(cluster: Any, text: str) -> Any:
    seen = cluster.observed()
    children = tuple(
        dataclasses.replace(child, complaint=text) if "decode" in child.name and child.kind == "StatefulSet" else child
        for child in seen.children
    )
    return dataclasses.replace(seen, children=children)


@pytest.mark.parametrize(
    ("text", "reason", "step"),
    [
        (QUOTA, "QuotaExceeded", "raise the ResourceQuota"),
        ("is forbidden: failed quota: q: must specify cpu", "QuotaExceeded", "resources.cpu"),
        ('is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot', "PodSecurityRefused", "podTemplate"),
        ("is forbidden: some policy", "PodsForbidden", ""),
        ("no such volume", "PodsRefused", ""),
    ],
)
def test_a_refused_pod_is_explained(model_cluster: Any, make_pool: Any, text: str, reason: str, step: str) -> None:
    cluster = starved(model_cluster, make_pool)
    conditions = {
        item["type"]: item for item in plan(complaining(cluster, text), Settings(), cluster.now).status["conditions"]
    }
    for kind in ("Ready", "Progressing", "Placed"):
        assert (conditions[kind]["status"], conditions[kind]["reason"]) == ("False", reason)
        assert text in conditions[kind]["message"]
        assert step in conditions[kind]["message"]


def test_a_pool_that_may_not_grow_serves_on(model_cluster: Any, make_pool: Any) -> None:
    cluster = model_cluster(make_pool({"decode": {"replicas": 2}}))
    cluster.settle()
    name = max(name for name, pod in cluster.pods.items() if pod.role == "decode")
    del cluster.pods[name]
    cluster._report()
    conditions = {
        item["type"]: item for item in plan(complaining(cluster, QUOTA), Settings(), cluster.now).status["conditions"]
    }
    assert conditions["Ready"]["status"] == "True"
    assert conditions["Placed"]["reason"] == "QuotaExceeded"


def test_a_deployment_says_it_in_its_status() -> None:
    conditions = [
        {"type": "Available", "status": "True"},
        {"type": "ReplicaFailure", "status": "True", "message": QUOTA},
    ]
    child = read_child("Deployment", {"metadata": {"name": "r"}, "status": {"conditions": conditions}})
    assert child.complaint == QUOTA
    conditions[1]["status"] = "False"
    assert not read_child("Deployment", {"metadata": {"name": "r"}, "status": {"conditions": conditions}}).complaint


def test_the_newest_failed_creation_counts() -> None:
    events = [
        {"reason": "FailedCreate", "message": "old", "lastTimestamp": "2026-01-01T00:00:00Z"},
        {"reason": "FailedCreate", "message": "new", "series": {"lastObservedTime": "2026-01-03T00:00:00Z"}},
        {"reason": "SuccessfulCreate", "message": "other", "eventTime": "2026-01-04T00:00:00Z"},
    ]
    assert complaint(events) == "new"
    assert complaint([]) == ""


def test_only_what_lacks_pods_is_asked_about(model_cluster: Any, make_pool: Any) -> None:
    cluster = starved(model_cluster, make_pool)
    assert [group.role for group in lacking(groups(cluster.observed()))] == ["decode"]
    assert refused(cluster.observed()) is None


class Server:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.events_: list[dict[str, Any]] = []
        self.refuses = False

    async def events(self, namespace: str, kind: str, name: str) -> list[dict[str, Any]]:
        self.asked.append(name)
        if self.refuses:
            raise ApiRefused(403, "no")
        return self.events_


@pytest.mark.looptime
async def test_a_controller_is_listened_to_while_it_fails(model_cluster: Any, make_pool: Any) -> None:
    cluster, server = starved(model_cluster, make_pool), Server()
    complaints = Complaints(server)  # type: ignore[arg-type]
    assert await complaints.listen(KEY, cluster.observed()) == SOON
    assert complaints.of(KEY) == {}
    server.events_ = [{"reason": "FailedCreate", "message": QUOTA}]
    assert await complaints.listen(KEY, cluster.observed()) == SOON, "not again at once"
    await asyncio.sleep(SOON)
    assert await complaints.listen(KEY, cluster.observed()) == LATER
    assert list(complaints.of(KEY).values()) == [QUOTA]
    server.refuses = True
    await asyncio.sleep(LATER)
    await complaints.listen(KEY, cluster.observed())
    assert list(complaints.of(KEY).values()) == [QUOTA], "what was said stays"
    assert len(server.asked) == 3
    cluster.settle()
    assert await complaints.listen(KEY, cluster.observed()) is None
    assert complaints.of(KEY) == {}
