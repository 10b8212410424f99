"""Groups of a running pool are moved to where they lie better, and nothing is moved on a guess."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from twinpool.cli.__main__ import main
from twinpool.core import protocol
from twinpool.demo.near import NAME, Pool, nodes
from twinpool.localcluster.waiting import wait_until

pytestmark = pytest.mark.cluster

#: Pods of one GPU each.
ONE: dict[str, Any] = {
    "resources": {"gpu": {"perNode": 1}},
    "drainTimeout": "1s",
    "podTemplate": {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}},
}


@pytest.fixture
def apart(near: Pool) -> Pool:
    """A pool whose prefill and decode group are in two racks, since others held the GPUs between them."""
    others = [near.occupy(node, gpus) for node, gpus in (("node-a", 1), ("node-b", 2), ("node-c", 1), ("node-d", 2))]
    near.apply({"prefill": ONE, "decode": ONE})
    wait_until(near.ready, 120, "the pool serves")
    assert sorted(nodes(workers(near))) == ["node-a", "node-c"]
    near.kubectl("delete", "pods", *others)
    return near


def workers(near: Pool) -> list[dict[str, Any]]:
    selector = f"{protocol.LABEL_POOL}={NAME},{protocol.LABEL_ROLE} in (prefill,decode)"
    items = near.cluster.json("-n", near.namespace, "get", "pods", "-l", selector)["items"]
    return [item for item in items if not item["metadata"].get("deletionTimestamp")]


def defragment(near: Pool, capsys: pytest.CaptureFixture[str], code: int, *more: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["defragment", NAME, "-n", near.namespace, "-o", "json", *more]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_proposal_is_carried_out_and_comes_true(apart: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    before = {pod["metadata"]["uid"] for pod in workers(apart)}
    (move,) = defragment(apart, capsys, 0)["moves"]
    assert {pod["metadata"]["uid"] for pod in workers(apart)} == before, "a proposal moves nothing"

    told = defragment(apart, capsys, 0, "--apply", "--yes")
    (moved,) = told["moved"]
    assert (moved["group"], moved["reason"], told["stopped"]) == (move["group"], "", "")
    groups = {pod["metadata"]["labels"][protocol.LABEL_GROUP]: pod["spec"]["nodeName"] for pod in workers(apart)}
    assert move["group"] not in groups
    assert groups[moved["successor"]] == move["to"][0], "it is where it was foretold"
    assert len(set(groups.values())) == 1, "prefill lies beside the decode that it feeds"
    assert apart.ready()
    assert defragment(apart, capsys, 0, "--apply", "--yes")["moves"] == [], "nothing is left to move"


def test_a_budget_that_lets_nothing_go_keeps_every_group(apart: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "mine"},
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {protocol.LABEL_POOL: NAME}}},
    }
    apart.kubectl("apply", "-f", "-", input=yaml.safe_dump(budget))
    before = {pod["metadata"]["uid"] for pod in workers(apart)}
    told = defragment(apart, capsys, 1, "--apply", "--yes")
    assert "PodDisruptionBudget mine lets no pod of group" in told["stopped"]
    assert {pod["metadata"]["uid"] for pod in workers(apart)} == before
