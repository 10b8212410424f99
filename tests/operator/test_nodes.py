"""Groups over several nodes: whole or not ready, told who leads, replaced when a lost node holds a part."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from twinpool.core import protocol
from twinpool.core.protocol import Leader
from twinpool.operator.logic.groups import LOST_AFTER, groups
from twinpool.operator.logic.leaders import naming
from twinpool.operator.logic.pods import nodes_of

WIDE = {"decode": {"parallelism": {"tensor": 8, "pipeline": 2}}}


def wide(make_pool: Any, model_cluster: Any) -> Any:
    cluster = model_cluster(make_pool(WIDE))
    cluster.settle()
    return cluster


def decode_set(cluster: Any) -> Any:
    (found,) = [child for child in cluster.sets().values() if child.label(protocol.LABEL_ROLE) == "decode"]
    return found


def test_a_group_has_a_pod_for_each_node(make_pool: Any, model_cluster: Any) -> None:
    cluster = wide(make_pool, model_cluster)
    child = decode_set(cluster)
    assert child.content["spec"]["replicas"] == 2
    engine = child.content["spec"]["template"]["spec"]["containers"][0]
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    config = json.loads(next(entry["value"] for entry in engine["env"] if entry["name"] == protocol.WORKER_CONFIG_ENV))
    assert (config["tensor"], config["pipeline"], config["nodes"], config["gpus"]) == (8, 2, 2, 8)
    (group,) = [found for found in groups(cluster.observed()) if found.role == "decode"]
    assert (group.size, group.ready) == (2, True)
    cluster.set_ready(False, lambda pod: pod.name.endswith("-1"))
    (group,) = [found for found in groups(cluster.observed()) if found.role == "decode"]
    assert not group.ready, "a group without one of its ranks serves nobody"


def test_every_pod_of_a_wide_group_is_told_its_leader(make_pool: Any, model_cluster: Any) -> None:
    cluster = wide(make_pool, model_cluster)
    child = decode_set(cluster)
    told = {pod.leader for pod in cluster.pods.values() if pod.group == child.name}
    assert told == {child.annotation(protocol.ANNOTATION_LEADER)}
    first = Leader.from_json(told.pop())
    assert first is not None
    assert (first.address, first.uid, first.epoch) == ("10.0.0.1", f"uid-{child.name}-0-1", 1)
    leader = f"{child.name}-0"
    del cluster.pods[leader]
    cluster.settle()
    second = Leader.from_json(cluster.pods[f"{child.name}-1"].leader)
    assert second is not None
    assert second.epoch == 2
    assert second.uid == cluster.pods[leader].uid != first.uid
    assert not {pod.leader for pod in cluster.pods.values() if pod.group != child.name} - {""}


def test_a_leader_without_address_or_on_its_way_out_is_not_named(make_pool: Any, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool(WIDE))
    cluster.reconcile()
    cluster.run_controllers()
    cluster.pods = {name: dataclasses.replace(pod, address="") for name, pod in cluster.pods.items()}
    assert not naming(groups(cluster.observed()))
    cluster.pods = {
        name: dataclasses.replace(pod, address="10.0.0.9", deadline=cluster.now) for name, pod in cluster.pods.items()
    }
    assert not naming(groups(cluster.observed()))


def test_a_group_of_which_a_lost_node_holds_a_pod_is_replaced(make_pool: Any, model_cluster: Any) -> None:
    cluster = wide(make_pool, model_cluster)
    before = decode_set(cluster).name
    lost = f"{before}-1"
    cluster.pods[lost] = dataclasses.replace(cluster.pods[lost], ready=False, deadline=cluster.now)
    cluster.reconcile()
    assert decode_set(cluster).name == before, "its grace period is not over"
    cluster.now += LOST_AFTER + 1
    cluster.reconcile()
    live = [group for group in groups(cluster.observed()) if group.role == "decode" and not group.retired]
    assert len(live) == 1
    assert live[0].name != before
    assert lost in cluster.pods, "nothing is force-deleted"
    for _ in range(6):
        cluster.run_controllers()
        cluster.end_pods(frozenset({lost}))
        cluster.set_ready()
        cluster.reconcile()
        cluster.now += 60
    assert before in cluster.sets(), "it stays while the node may come back"
    cluster.end_pods()
    cluster.settle()
    assert before not in cluster.sets()


def test_a_template_that_is_not_ours_is_one_pod() -> None:
    assert nodes_of({}) == 1
    broken = {"name": protocol.WORKER_CONFIG_ENV, "value": "{"}
    assert nodes_of({"spec": {"containers": [{}, {"env": [{"name": "A"}, broken]}]}}) == 1
