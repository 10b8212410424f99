"""Descriptions of nodes: what they mean, and every mistake with its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from twinpool.localcluster import nodes
from twinpool.localcluster.addresses import MOST_NODES
from twinpool.localcluster.errors import ClusterError
from twinpool.localcluster.nodes import NodeSpec

if TYPE_CHECKING:
    from pathlib import Path


def test_the_default_is_two_nodes_with_eight_gpus_in_two_racks() -> None:
    found = nodes.load(nodes.default_file())
    assert [node.name for node in found] == ["node-a", "node-b"]
    assert [node.capacity["nvidia.com/gpu"] for node in found] == ["8", "8"]
    assert [node.labels["topology.kubernetes.io/zone"] for node in found] == ["zone-a", "zone-b"]


def test_counts_labels_taints_and_capacity() -> None:
    text = {
        "nodes": [
            {"name": "gpu", "count": 2, "gpus": 4, "labels": {"rack": 7}, "taints": ["gpu=yes:NoSchedule"]},
            {"name": "cpu", "capacity": {"cpu": 16, "memory": "64Gi"}},
            {"name": "other", "gpus": 4, "capacity": {"nvidia.com/gpu": 2}},
        ]
    }
    gpu = ({"rack": "7"}, ("gpu=yes:NoSchedule",), {"nvidia.com/gpu": "4"})
    assert nodes.parse(text, "x") == (
        NodeSpec("gpu-0", *gpu),
        NodeSpec("gpu-1", *gpu),
        NodeSpec("cpu", {}, (), {"cpu": "16", "memory": "64Gi"}),
        NodeSpec("other", {}, (), {"nvidia.com/gpu": "2"}),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "x: no list of nodes - write 'nodes:'"),
        ({"nodes": []}, "x: no list of nodes"),
        ({"nodes": [{"name": "a"}], "more": 1}, "x: no list of nodes"),
        ({"nodes": ["a"]}, r"x: nodes\[0\] is not an object"),
        ({"nodes": [{"name": "a", "gpu": 1}]}, r"nodes\[0\]: unknown field 'gpu' - the fields are name, count"),
        ({"nodes": [{}]}, r"nodes\[0\]\.name: None cannot name a node"),
        ({"nodes": [{"name": "A_b"}]}, "'A_b' cannot name a node"),
        (
            {"nodes": [{"name": "a"}, {"name": "b", "count": 0}]},
            r"nodes\[1\]\.count: 0 - give a whole number, at least 1",
        ),
        ({"nodes": [{"name": "a" * 62, "count": 2}]}, "with its number is too long - a node's name has at most 63"),
        ({"nodes": [{"name": "a", "gpus": True}]}, "gpus: True"),
        ({"nodes": [{"name": "a", "gpus": -1}]}, "gpus: -1 - give a whole number, at least 0"),
        ({"nodes": [{"name": "a", "capacity": {"memory": "64GB"}}]}, "capacity.memory: '64GB' is no quantity"),
        ({"nodes": [{"name": "a", "labels": ["x"]}]}, "labels: not an object of strings"),
        ({"nodes": [{"name": "a", "labels": {"x": True}}]}, "quote true and false"),
        ({"nodes": [{"name": "a", "labels": {"x": "a,b"}}]}, "labels.x: 'a,b' holds"),
        ({"nodes": [{"name": "a", "taints": "x"}]}, "taints: not a list"),
        ({"nodes": [{"name": "a", "taints": ["x=y:Never"]}]}, r"taints\[0\]: 'x=y:Never' - write KEY=VALUE:EFFECT"),
        ({"nodes": [{"name": "a"}, {"name": "a"}]}, "two nodes are named 'a'"),
        ({"nodes": [{"name": "a", "count": MOST_NODES + 1}]}, f"{MOST_NODES + 1} nodes - one cluster runs at most"),
    ],
)
def test_mistakes_are_named(content: object, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        nodes.parse(content, "x")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none.yaml: No such file"):
        nodes.load(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("nodes: [")
    with pytest.raises(ClusterError, match=r"bad.yaml is no YAML"):
        nodes.load(bad)
