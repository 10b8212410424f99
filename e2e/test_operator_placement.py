"""Nodes chosen by the operator: whole groups on nodes that belong together, or the reason why not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.cli.__main__ import main
from twinpool.core import protocol
from twinpool.demo.near import CLIQUE, MANIFEST, NAME, WIDE, Pool, nodes
from twinpool.demo.scenario import OPERATOR_NAMESPACE, pool
from twinpool.localcluster import images
from twinpool.localcluster.waiting import wait_until
from twinpool.localengine import image as engine_images

if TYPE_CHECKING:
    from pathlib import Path

    from twinpool.localengine.layout import Engine

pytestmark = pytest.mark.cluster


def events(near: Pool) -> str:
    return near.kubectl("get", "events", "--field-selector", "reason=FailedScheduling", "-o", "name")


def foretold(near: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str], **spec: Any) -> dict[str, Any]:
    """Return what the command line says about the pool before it is applied."""
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump({**MANIFEST, "spec": {**MANIFEST["spec"], **spec}}))
    capsys.readouterr()
    assert main(["plan", "-f", str(file), "-n", near.namespace, "-o", "json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def places(said: dict[str, Any]) -> list[list[str]]:
    return sorted([entry["node"] for entry in group["ranks"]] for group in said["groups"])


def test_a_group_goes_whole_into_one_nvlink_domain(
    near: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = foretold(near, tmp_path, capsys)
    near.apply()
    wait_until(near.ready, 120, "the pool serves")
    placed = near.workers()
    assert [nodes(placed)] == places(before), "what was applied is what was foretold"
    assert sorted(nodes(placed)) in (["node-a", "node-b"], ["node-c", "node-d"])
    for pod in placed:
        terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert pod["spec"]["nodeName"] in json.dumps(terms), "kube-scheduler binds as planned"
        assert not pod["spec"].get("schedulingGates")
    assert not events(near)
    assert pool(near.cluster, near.namespace, NAME)["status"]["placement"] == "pin"
    assert near.condition("Placed")["status"] == "True"


def test_two_groups_take_a_domain_each(near: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two = {**WIDE, "replicas": 2}
    before = foretold(near, tmp_path, capsys, decode=two)
    near.apply({"decode": two})
    wait_until(near.ready, 120, "the pool serves")
    wait_until(lambda: len([node for node in nodes(near.workers()) if node]) == 4, 60, "every pod has a node")
    groups: dict[str, list[str]] = {}
    for pod in near.workers():
        groups.setdefault(pod["metadata"]["labels"][protocol.LABEL_GROUP], []).append(pod["spec"]["nodeName"])
    assert sorted(map(sorted, groups.values())) == [["node-a", "node-b"], ["node-c", "node-d"]]
    assert sorted(groups.values()) == places(before), "what was applied is what was foretold"
    capsys.readouterr()
    assert main(["explain", NAME, "--placement", "-n", near.namespace]) == 0
    assert "no better layout was found" in capsys.readouterr().out
    assert not events(near)


def test_a_torn_domain_is_explained_and_used_once_it_is_whole(near: Pool) -> None:
    others = [near.occupy(node, 1) for node in ("node-b", "node-d")]
    near.apply()
    said = wait_until(near.short, 60, "the pool says what is short")
    assert said["reason"] in ("TopologyUnmet", "NotEnoughFree")
    assert "NVLink domain" in said["message"]
    assert f"held by {near.namespace}/other-node-" in said["message"]
    pods = near.workers()
    assert all(pod["spec"]["schedulingGates"] == [{"name": protocol.PLACEMENT_GATE}] for pod in pods)
    assert not events(near), "nobody asked kube-scheduler for what cannot be"
    near.kubectl("delete", "pod", others[0], "--wait=false")
    wait_until(near.ready, 120, "the pool serves")
    assert sorted(nodes(near.workers())) == ["node-a", "node-b"]


def test_a_pod_that_no_node_can_hold_is_shown_to_autoscalers(near: Pool) -> None:
    small = {**WIDE, "parallelism": {"tensor": 2}, "scheduling": {"nodeSelector": {"made-for": near.namespace}}}
    near.apply({"decode": small})
    wait_until(lambda: events(near), 60, "kube-scheduler says that the pod is unschedulable")
    assert not near.workers()[0]["spec"].get("schedulingGates")
    near.cluster.kubectl("label", "node", "node-c", f"made-for={near.namespace}")
    try:
        wait_until(near.ready, 120, "the node that came is used")
        assert nodes(near.workers()) == ["node-c"]
    finally:
        near.cluster.kubectl("label", "node", "node-c", "made-for-")


def test_a_race_that_was_lost_is_run_again(near: Pool) -> None:
    """What only kube-scheduler knows stands for a race: a pod of somebody else that wants no worker beside it."""
    alone = {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": {"matchLabels": {protocol.LABEL_POOL: NAME}}, "topologyKey": CLIQUE}
        ]
    }
    others = [near.occupy(node, 0, affinity={"podAntiAffinity": alone}) for node in ("node-a", "node-c")]
    near.apply()
    first = wait_until(lambda: [pod["metadata"]["uid"] for pod in near.workers()] or None, 60, "there are pods")
    wait_until(lambda: events(near), 60, "kube-scheduler refuses the node")

    def others_now() -> bool:
        now = {pod["metadata"]["uid"] for pod in near.workers()}
        return len(now) == 2 and not now.intersection(first)

    wait_until(others_now, 90, "the whole group is made anew")
    near.kubectl("delete", "pod", *others, "--wait=false")
    wait_until(near.ready, 180, "the pool serves")
    assert sorted(nodes(near.workers())) in (["node-a", "node-b"], ["node-c", "node-d"])


def test_without_pinning_kube_scheduler_is_told_what_is_wished_for(near: Pool) -> None:
    near.apply({"placement": {"mode": "affinity"}})
    wait_until(near.ready, 120, "the pool serves")
    assert pool(near.cluster, near.namespace, NAME)["status"]["placement"] == "affinity"
    wishes = near.workers()[0]["spec"]["affinity"]
    keys = json.dumps(wishes)
    assert CLIQUE in keys
    assert protocol.LABEL_GROUP in keys
    assert len({node[-1] in "ab" for node in nodes(near.workers())}) == 1, "both pods are in one domain"


def test_a_group_that_only_new_nodes_can_hold_is_shown_to_autoscalers(near: Pool) -> None:
    """One node of the rack is not there yet: both pods are refused for it to see, and lie whole when it has come."""
    local = near.cluster
    local.kill_node("node-d")
    local.kubectl("delete", "node", "node-d")
    try:
        near.apply({"decode": {**WIDE, "scheduling": {"nodeSelector": {"network.topology.nvidia.com/leaf": "r1"}}}})

        def shown() -> bool:
            pods = near.workers()
            return len(pods) == 2 and all(refused(pod) and not pod["spec"].get("schedulingGates") for pod in pods)

        wait_until(shown, 90, "kube-scheduler refuses both pods for an autoscaler to see")
        affinity = near.workers()[0]["spec"]["affinity"]
        (together,) = affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert together["topologyKey"] == CLIQUE
        assert "node-c" in json.dumps(affinity["nodeAffinity"]), "half of the group takes no node that is there"
        wait_until(near.short, 60, "the pool says what is short")
        assert nodes(near.workers()) == ["", ""]
    finally:
        local.start_node("node-d")
    wait_until(near.ready, 180, "the pool serves")
    wait_until(lambda: sorted(nodes(near.workers())) == ["node-c", "node-d"], 60, "the group is whole on both nodes")
    wait_until(lambda: near.condition("Placed")["status"] == "True", 60, "it is placed")


def refused(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(item["type"] == "PodScheduled" and item.get("reason") == "Unschedulable" for item in conditions)


#: A Python that has torch. As an engine it does nothing; between its ranks everything takes a quarter of a second
#: longer, which stands for a bad cable.
BAD_CABLE = """#!{python}
import os, sys
if sys.argv[1] == "-m":
    os.execvp("sleep", ["sleep", "3600"])
if sys.argv[2] != "preflight-rank":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
import time
sys.path.insert(0, sys.argv[1])
from twinpool.worker.shell.preflight_rank import Ranks
exchange = Ranks.exchange
def slowed(self, pair, data):
    time.sleep(0.25)
    exchange(self, pair, data)
Ranks.exchange = slowed
from twinpool.worker.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


def test_a_slow_link_is_told_and_the_next_group_avoids_it(near: Pool, installed_engine: Engine, tmp_path: Path) -> None:
    """What gloo measures here is loopback: the promise is set to fit it."""
    operator = ("-n", OPERATOR_NAMESPACE, "deployment/twinpool-operator")
    near.cluster.kubectl("set", "env", *operator, "TWINPOOL_LINKS=nvlink=200M")
    near.cluster.kubectl("rollout", "status", *operator, "--timeout=90s", timeout=100)
    near.cluster.add_images(images.parse({"bad-cable": engine_images.engine_image()}, "the bad cable"))
    python = tmp_path / "python"
    python.write_text(BAD_CABLE.format(python=installed_engine.python))
    python.chmod(0o755)
    one_each = {**WIDE, "parallelism": {"tensor": 2}, "resources": {"gpu": {"perNode": 1}}}
    near.apply({"engine": {"image": "bad-cable", "python": str(python)}, "decode": one_each})
    wait_until(lambda: near.condition("InterconnectVerified").get("status") == "False", 240, "the link is flagged")
    slow = sorted(nodes(near.workers()))
    said = near.condition("InterconnectVerified")
    assert said["reason"] == "SlowLink"
    assert f"MB/s of the 200 MB/s that level nvlink promises between nodes {slow[0]} and {slow[1]}" in said["message"]
    (link,) = pool(near.cluster, near.namespace, NAME)["status"]["slowLinks"]
    assert (link["nodes"], link["level"], link["promised"]) == (slow, "nvlink", 200_000_000)
    assert 0 < link["measured"] < 100_000_000
    (level,) = pool(near.cluster, near.namespace, NAME)["status"]["links"]
    assert (level["level"], level["pairs"], level["configured"]) == ("nvlink", 1, 200_000_000)
    assert level["bandwidth"] == link["measured"], "one pair is its own median, which does not count yet"
    group = near.workers()[0]["metadata"]["labels"][protocol.LABEL_GROUP]
    near.kubectl("delete", "statefulset", group)
    wait_until(lambda: group not in near.kubectl("get", "pods", "-o", "name"), 120, "its pods are gone")
    wait_until(lambda: len([node for node in nodes(near.workers()) if node]) == 2, 120, "the next group is on nodes")
    assert not set(nodes(near.workers())) & set(slow), "although these are free again"
