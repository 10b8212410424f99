"""What the operator tells routers of where workers are: once, and again when the network is known better."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from bench.placement.cases import LABELS
from twinpool.core import protocol
from twinpool.core.distance import Place, bandwidth
from twinpool.core.status import LinkStatus
from twinpool.core.topology import PRESETS, topology
from twinpool.operator.logic.distances import telling, to_read
from twinpool.operator.logic.groups import Group
from twinpool.operator.logic.observed import Child, Observed, PodView, read_pod
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

TOPOLOGY = topology(PRESETS["topograph"])
SEES = Settings(topology=TOPOLOGY, sees_nodes=True)
NODES = {"a": {LABELS["rack"]: "r1"}, "b": {LABELS["rack"]: "r1"}, "c": {LABELS["rack"]: "r2"}}


def group(name: str, node: str, *, deleting: bool = False, **pod: Any) -> Group:
    leader = dataclasses.replace(PodView(f"{name}-0", "decode", name, uid=f"u{name}", node=node), **pod)
    metadata: dict[str, Any] = {"annotations": {}, "labels": {}}
    child = Child("StatefulSet", name, f"s{name}", "7", {"metadata": metadata}, deleting=deleting)
    return Group(child, "decode", "r", 1, (leader,), 1)


@pytest.fixture
def priced(make_pool: Callable[..., InferencePool]) -> InferencePool:
    return make_pool(routing={"policy": "price"})


def told(pool: InferencePool, groups: list[Group], labels: Any = None) -> dict[str, Place]:
    observed = Observed(pool, node_labels=NODES if labels is None else labels)
    actions = telling(observed, groups, TOPOLOGY)
    assert {(action.kind, action.key) for action in actions} <= {("Pod", protocol.ANNOTATION_PLACE)}
    found = {action.name: Place.from_json(action.value or "") for action in actions}
    assert all(found.values())
    return found  # type: ignore[return-value]


def test_every_leader_is_told_once(priced: InferencePool) -> None:
    groups = [group("g1", "a"), group("g2", "b"), group("g3", "c")]
    assert to_read(priced, groups, TOPOLOGY) == {"a", "b", "c"}
    found = told(priced, groups)
    rack, cluster = bandwidth(found["g1-0"], found["g2-0"]), bandwidth(found["g1-0"], found["g3-0"])
    assert rack is not None
    assert cluster is not None
    assert rack > cluster
    done = [group(g.name, g.pods[0].node, place=found[f"{g.name}-0"].to_json()) for g in groups]
    assert told(priced, done) == {}
    assert told(priced, done, labels={}) == {}, "and no label is needed any more"
    assert to_read(priced, done, TOPOLOGY) == set()


def test_nobody_is_told_where_nobody_asks_or_nothing_is_known(
    priced: InferencePool, make_pool: Callable[..., InferencePool]
) -> None:
    groups = [group("g1", "a")]
    assert told(priced, groups, labels={}) == {}
    none = [group("g1", ""), group("g2", "a", deleting=True), group("g3", "a", deadline=1.0)]
    assert told(priced, none) == {}
    assert to_read(priced, none, TOPOLOGY) == set()
    for other in (make_pool(), make_pool(routing={"policy": "price"}, prefill=None)):
        assert to_read(other, groups, TOPOLOGY) == set()
        assert told(other, groups) == {}


def test_what_was_measured_beats_the_promise_and_other_levels_are_read_again(priced: InferencePool) -> None:
    first = told(priced, [group("g1", "a")])["g1-0"]
    said = {"level": "rack", "pairs": 8, "bandwidth": 10**10, "latency": 1e-5, "configured": 5 * 10**10}
    link = LinkStatus.model_validate({**said, "since": "2026-01-01T00:00:00Z"})
    priced = priced.model_copy(update={"status": priced.status.model_copy(update={"links": (link,)})})
    again = told(priced, [group("g1", "a", place=first.to_json())], labels={})["g1-0"]
    rack = TOPOLOGY.index("rack")
    assert (again.path, again.bandwidths[rack]) == (first.path, 1e10)
    assert again.bandwidths[rack] < first.bandwidths[rack]
    other = Place(("cluster", "a"), (1e9, 2e9)).to_json()
    assert to_read(priced, [group("g1", "a", place=other)], TOPOLOGY) == {"a"}
    assert told(priced, [group("g1", "a", place=other)])["g1-0"] == again


def test_a_pod_is_read_with_what_it_was_told() -> None:
    body = {"metadata": {"name": "p", "annotations": {protocol.ANNOTATION_PLACE: "x"}}}
    assert read_pod(body).place == "x"
    assert read_pod({"metadata": {"name": "p"}}).place == ""


def test_a_plan_tells_places_once_and_only_where_nodes_may_be_read(make_pool: Any, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool(routing={"policy": "price"}))
    cluster.settle(SEES)
    for name, pod in cluster.pods.items():
        cluster.pods[name] = dataclasses.replace(pod, node="a")
    observed = dataclasses.replace(cluster.observed(), node_labels=NODES)
    assert plan(observed, Settings(topology=TOPOLOGY), cluster.now).actions == ()
    actions = plan(observed, SEES, cluster.now).actions
    assert sorted(action.key for action in actions) == [protocol.ANNOTATION_PLACE] * 2  # type: ignore[union-attr]
    leaders = {pod.name for pod in cluster.pods.values() if pod.role in protocol.ROLES}
    assert {action.name for action in actions} == leaders  # type: ignore[union-attr]
    told = {action.name: action.value for action in actions}  # type: ignore[union-attr]
    pods = tuple(dataclasses.replace(pod, place=told.get(pod.name, "")) for pod in observed.pods)
    assert plan(dataclasses.replace(observed, pods=pods), SEES, cluster.now).actions == ()
