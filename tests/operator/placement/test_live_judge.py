"""The judge of random clusters: what is not as it must be is found, so that "as it must be" means something."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from bench.placement.cases import GPU
from bench.placement.live.cases import drawn, foreign
from bench.placement.live.judge import (
    Scene,
    asked_by_role,
    broken,
    differences,
    refused_wrongly,
    short_wrongly,
)
from twinpool.core import protocol
from twinpool.operator.logic.placement.affinity import narrowing

POOL: dict[str, Any] = {
    "apiVersion": protocol.API_VERSION,
    "kind": protocol.KIND,
    "metadata": {"name": "p", "namespace": "ns"},
    "spec": {"model": {"name": "tiny"}, "decode": {}, "placement": {}},
}


def node(name: str, gpus: int = 2) -> dict[str, Any]:
    amounts = {GPU: str(gpus), "pods": "10"}
    return {
        "metadata": {"name": name, "labels": {}},
        "spec": {},
        "status": {"allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]},
    }


def group(name: str, gpus: int) -> dict[str, Any]:
    """Return the StatefulSet of a group of one pod."""
    containers = [{"name": "engine", "resources": {"limits": {GPU: str(gpus)}}}]
    labels = {protocol.LABEL_ROLE: "decode"}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"replicas": 1, "template": {"spec": {"containers": containers}}},
    }


def pod(of: dict[str, Any], at: str = "", sent: str | None = None) -> dict[str, Any]:
    """Return the pod of a group: on a node, sent to one (by default the same), or gated."""
    spec = copy.deepcopy(of["spec"]["template"]["spec"])
    if where := at if sent is None else sent:
        spec["affinity"] = narrowing({}, where)[0]["value"]
    if at:
        spec["nodeName"] = at
    elif sent is None:
        spec["schedulingGates"] = [{"name": protocol.PLACEMENT_GATE}]
    name = of["metadata"]["name"]
    labels = {protocol.LABEL_GROUP: name}
    return {"metadata": {"name": f"{name}-0", "namespace": "ns", "uid": name, "labels": labels}, "spec": spec}


def said(*nodes: str, short: int = 0, reason: str = "NotEnoughFree") -> dict[str, Any]:
    """Return an answer of ``twinpool plan``."""
    placed = [{"name": name, "role": "decode", "ranks": [{"rank": 0, "node": name}]} for name in nodes]
    lacking = {"name": "x", "role": "decode", "ranks": [], "short": {"reason": reason, "message": "m", "remedy": "r"}}
    return {"groups": [*placed, *([lacking] * short)]}


def condition(message: str, reason: str = "NotEnoughFree") -> dict[str, Any]:
    entry = {"type": "Placed", "status": "False", "reason": reason, "message": message}
    return {**POOL, "status": {"conditions": [entry]}}


A, B, C = group("a", 2), group("b", 2), group("c", 2)


def scene(*pods: dict[str, Any], pool: dict[str, Any] = POOL, sets: tuple[dict[str, Any], ...] = (A, B)) -> Scene:
    return Scene([node("n1"), node("n2")], list(pods), list(sets), pool)


PLACED = scene(pod(A, "n1"), pod(B, "n2"))


def test_what_was_foretold_and_came_true_is_no_difference() -> None:
    assert PLACED.rests
    assert differences(said("n2", "n1"), PLACED) == []
    assert broken(PLACED) == []


def test_another_node_than_foretold_is_a_difference() -> None:
    assert "applied" in differences(said("n1", "n3"), PLACED)[0]
    elsewhere = scene(pod(A, "n1", sent="n2"), pod(B, "n2"))
    assert "was sent to ['n2'] and is on ['n1']" in differences(said("n1", "n2"), elsewhere)[0]


def test_shortages_are_compared_by_number_and_reason() -> None:
    waiting = scene(pod(A, "n1"), pod(B), pool=condition("group b: no room"))
    assert waiting.rests
    assert differences(said("n1", short=1), waiting) == []
    assert differences(said("n1"), waiting) == ["0 groups should be short, 1 are"]
    assert "foretold" in differences(said("n1", short=1, reason="Fragmented"), waiting)[0]
    two = scene(pod(A, "n1"), pod(B), pod(C), pool=condition("group b: no (1 more groups wait)"), sets=(A, B, C))
    assert differences(said("n1", short=2), two) == []
    assert "1 are said to be" in differences(said("n1", short=2), replace(two, pool=condition("group b: no")))[0]


def test_a_pod_for_autoscalers_is_refused_in_the_words_of_kube_scheduler() -> None:
    shown = scene(pod(A, "n1"), pod(B, sent=""), pool=condition("0/2 nodes are available", "Unschedulable"))
    assert shown.rests
    assert differences(said("n1", short=1, reason="NoSuchNode"), shown) == []


@pytest.mark.parametrize(
    "pods",
    [
        (),
        (pod(A, "n1"),),
        (pod(A, "n1"), pod(B, sent="n2")),
        (pod(A, "n1"), pod(B)),
    ],
    ids=["no pods", "one is not there", "one is on its way", "one waits and nobody says why"],
)
def test_what_is_not_at_rest(pods: tuple[dict[str, Any], ...]) -> None:
    assert not scene(*pods).rests


def test_a_refusal_is_put_to_the_solver() -> None:
    gangs = asked_by_role(PLACED)
    empty = scene(sets=())
    assert refused_wrongly(said("n1", "n2", short=1), empty, gangs) == []
    assert "although it fits" in refused_wrongly(said("n1", short=1), empty, gangs)[0]
    other = {**foreign("o", 2, "n2"), "metadata": {"name": "o", "namespace": "x", "uid": "o"}}
    assert refused_wrongly(said("n1", short=1), scene(other, sets=()), gangs) == []


def test_a_group_that_waits_is_put_to_the_solver() -> None:
    waiting = scene(pod(A, "n1"), pod(B))
    assert short_wrongly(waiting) == ["b waits although it fits"]
    assert short_wrongly(scene(pod(A, "n1"), pod(B, "n2"), pod(C), sets=(A, B, C))) == []


def test_a_node_over_its_capacity_is_found() -> None:
    assert "n1 gives 4 of 2" in broken(scene(pod(A, "n1"), pod(B, "n1")))[0]


def test_cases_are_the_same_every_time_and_differ() -> None:
    cases = [drawn(seed) for seed in range(60)]
    assert cases == [drawn(seed) for seed in range(60)]
    assert 5 < sum(bool(case.rivals) for case in cases) < 30
    assert {len(case.pools) for case in cases} == {1, 2}
    assert any(item["spec"]["taints"] for case in cases for item in case.nodes)
    assert all(case.nodes for case in cases)
