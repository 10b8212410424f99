"""Groups over several nodes on a cluster of their own: ranks that die together, and nodes that are lost."""

from __future__ import annotations

import copy
import io
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.core.protocol import Leader
from twinpool.demo.client import post
from twinpool.demo.phases import Phases
from twinpool.demo.scenario import condition, install_twinpool, pool, router_url
from twinpool.localcluster import cluster as clusters
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twinpool.localcluster.cluster import LocalCluster

pytestmark = pytest.mark.cluster

NAME = "wide"
GONE = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    for taint in ("unreachable", "not-ready")
]
DECODE: dict[str, Any] = {
    "parallelism": {"tensor": 2, "pipeline": 2},
    "resources": {"gpu": {"perNode": 2}},
    "scheduling": {"tolerations": GONE},
    "startupTimeout": "2m",
    "drainTimeout": "1s",
    # The simulated engine needs no GPU; these pods ask for some, so that they are placed as others would be.
    "podTemplate": {
        "spec": {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
    },
}
MANIFEST: dict[str, Any] = {
    "apiVersion": protocol.API_VERSION,
    "kind": protocol.KIND,
    "metadata": {"name": NAME},
    "spec": {"model": {"name": "tiny"}, "engine": {"kind": "simulated"}, "decode": DECODE},
}


@pytest.fixture(scope="module")
def three(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster of three nodes with two GPUs each, and Twinpool on the one that no test kills."""
    if request.config.getoption("--cluster") == "external":
        pytest.skip("only nodes of a local cluster can be killed")
    request.getfixturevalue("binaries")
    file: Path = tmp_path_factory.mktemp("nodes") / "nodes.yaml"
    file.write_text(yaml.safe_dump({"nodes": [{"name": f"node-{letter}", "gpus": 2} for letter in "abc"]}))
    name = next(name for i in itertools.count() if clusters.is_free(name := f"test-nodes-{i}"))
    with clusters.running(name, nodes=file) as local:
        # What is not a worker stays on node-c.
        for letter in "ab":
            local.kubectl("cordon", f"node-{letter}")
        install_twinpool(local, Phases(io.StringIO()))
        for letter in "ab":
            local.kubectl("uncordon", f"node-{letter}")
        yield local


class Group:
    """The decode group of the pool, as it is now."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments, **options).stdout

    def pods(self) -> dict[str, dict[str, Any]]:
        """Return the worker pods by name, those on their way out too."""
        selector = f"{protocol.LABEL_POOL}={NAME},{protocol.LABEL_ROLE}=decode"
        items = self.cluster.json("-n", self.namespace, "get", "pods", "-l", selector)["items"]
        return {item["metadata"]["name"]: item for item in items}

    def live(self) -> list[dict[str, Any]]:
        """Return the pods that are to stay, the leader first."""
        found = [pod for pod in self.pods().values() if not pod["metadata"].get("deletionTimestamp")]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def ready(self) -> bool:
        return condition(pool(self.cluster, self.namespace, NAME), "Ready").get("status") == "True"

    def answers(self) -> bool:
        url = f"{router_url(self.cluster, self.namespace, NAME)}/v1/completions"
        return post(url, {"model": "tiny", "prompt": "a b c", "max_tokens": 3}).status == 200

    def kill_engine(self, pod: str) -> None:
        find = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q simulate && kill -9 ${p#/proc/}; done"
        self.kubectl("exec", pod, "-c", "engine", "--", "sh", "-c", find, check=False)


@pytest.fixture
def group(three: LocalCluster) -> Iterator[Group]:
    """A ready pool whose one group has a rank on each of node-a and node-b."""
    with three.fresh_namespace() as namespace:
        found = Group(three, namespace)
        # The router stays on node-c, which is closed to workers then.
        router = {"podTemplate": {"spec": {"nodeSelector": {"kubernetes.io/hostname": "node-c"}}}}
        manifest = copy.deepcopy(MANIFEST)
        manifest["spec"] |= {"routing": router, "decode": {**DECODE, "replicas": 0}}
        found.kubectl("apply", "-f", "-", input=yaml.safe_dump(manifest))
        wait_until(lambda: pool(three, namespace, NAME)["status"]["router"]["ready"] == 1, 90, "the router is ready")
        three.kubectl("cordon", "node-c")
        manifest["spec"]["decode"] = DECODE
        found.kubectl("apply", "-f", "-", input=yaml.safe_dump(manifest))
        wait_until(found.ready, 120, "the group is ready")
        yield found
        found.kubectl("delete", "tpool", NAME)
        wait_until(lambda: not found.pods(), 90, "its pods are gone")
    three.kubectl("uncordon", "node-c")


def test_a_group_over_two_nodes_serves_and_its_ranks_restart_together(group: Group) -> None:
    first, second = group.live()
    assert {first["spec"]["nodeName"], second["spec"]["nodeName"]} == {"node-a", "node-b"}
    told = {pod["metadata"]["annotations"][protocol.ANNOTATION_LEADER] for pod in (first, second)}
    leader = Leader.from_json(told.pop())
    assert not told
    assert leader == Leader(first["status"]["podIP"], first["metadata"]["uid"], 1)
    assert group.answers()
    group.kill_engine(second["metadata"]["name"])
    wait_until(lambda: not group.ready(), 60, "a group without one rank is not ready")
    wait_until(group.ready, 90, "it is ready again")
    again = group.live()
    assert [pod["metadata"]["uid"] for pod in again] == [pod["metadata"]["uid"] for pod in (first, second)]
    assert all(status["restartCount"] == 0 for pod in again for status in pod["status"]["containerStatuses"])
    assert group.answers()


def test_a_pod_that_is_deleted_comes_back_and_the_group_begins_anew(group: Group) -> None:
    first, second = group.live()
    group.kubectl("delete", "pod", first["metadata"]["name"])

    def renewed() -> bool:
        now = group.live()
        told = [
            Leader.from_json(pod["metadata"].get("annotations", {}).get(protocol.ANNOTATION_LEADER, "")) for pod in now
        ]
        return len(now) == 2 and all(leader is not None and leader.epoch == 2 for leader in told) and group.ready()

    wait_until(renewed, 120, "the ranks follow the new leader")
    assert group.live()[1]["metadata"]["uid"] == second["metadata"]["uid"]
    assert group.answers()


def test_a_lost_node_is_replaced_where_gpus_are_spare(group: Group, three: LocalCluster) -> None:
    first, second = group.live()
    lost = second["spec"]["nodeName"]
    three.kubectl("uncordon", "node-c")
    three.kill_node(lost)
    try:

        def replaced() -> bool:
            now = group.live()
            names = {pod["metadata"]["labels"][protocol.LABEL_GROUP] for pod in now}
            return len(now) == 2 and first["metadata"]["labels"][protocol.LABEL_GROUP] not in names and group.ready()

        wait_until(replaced, 180, "another group serves under another name")
        hanging = group.pods()[second["metadata"]["name"]]
        assert hanging["metadata"]["deletionTimestamp"], "nothing was force-deleted"
        assert group.answers()
    finally:
        three.start_node(lost)
    wait_until(lambda: second["metadata"]["name"] not in group.pods(), 90, "the node is back, what hung there is gone")
    sets = lambda: group.kubectl("get", "statefulset", "-o", "name").split()  # noqa: E731
    wait_until(lambda: len(sets()) == 1, 60, "and so is its group")


def test_a_lost_node_without_spare_gpus_is_explained(group: Group, three: LocalCluster) -> None:
    first, second = group.live()
    lost = second["spec"]["nodeName"]
    three.kill_node(lost)
    try:

        def explained() -> str:
            found = condition(pool(three, group.namespace, NAME), "Placed")
            return found["message"] if found["status"] == "False" else ""

        said = wait_until(explained, 180, "the pool says that no node is left")
        assert "has no node" in said
        assert "nvidia.com/gpu" in said or "unschedulable" in said
        names = {pod["metadata"]["labels"][protocol.LABEL_GROUP] for pod in group.live()}
        assert first["metadata"]["labels"][protocol.LABEL_GROUP] not in names
    finally:
        three.start_node(lost)
    wait_until(group.ready, 120, "the node is back and the new group serves")
