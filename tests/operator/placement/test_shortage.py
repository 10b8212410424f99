"""A shortage names what is short, where, who holds it, and what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench.placement.cases import GPU, node, pool
from twinpool.core.topology import PRESETS, Topology, topology
from twinpool.operator.logic.placement.model import Constraints, Gang, Node, Places, Shortfall, Taint
from twinpool.operator.logic.placement.place import place

TOPOLOGY = topology(PRESETS["topograph"])


def short(
    gangs: list[Gang], nodes: list[Node], placed: Places | None = None, layout: Topology = TOPOLOGY, **wants: Any
) -> Shortfall:
    answer = place(gangs, nodes, placed or {}, layout, {gang.pool: Constraints(**wants) for gang in gangs})
    (found,) = answer.short.values()
    return found


def one(**changes: Any) -> list[Gang]:
    (gang,) = pool("ns/p", 0, 1, 8)
    return [dataclasses.replace(gang, **changes)]


def test_no_node_matches() -> None:
    found = short(one(selector={"gpu": "h100"}), [node("n1", "b1", "r1", None, 8)])
    assert found.reason == "NoSuchNode"
    assert found.in_vain
    assert str(found) == ("none of 1 nodes matches gpu=h100 - label nodes so, add such nodes, or change the selector")
    assert "its node affinity" in short(one(terms=((),)), [node("n1", "b1", "r1", None, 8)]).message
    assert "none of 0 nodes" in short(one(), []).message


@pytest.mark.parametrize(
    ("amounts", "words"),
    [
        ({GPU: 8}, "no node has 8 GPUs for one pod; the largest of 1 that match has 4 GPUs"),
        (
            {GPU: 1, "memory": 3 * 2**30},
            "no node has 3Gi of memory for one pod; the largest of 1 that match has 2Gi of memory",
        ),
        ({GPU: 1, "cpu": 2500}, "no node has 2.5 CPU for one pod; the largest of 1 that match has 0 CPU"),
        ({GPU: 1, "rdma/hca": 1}, "no node has 1 rdma/hca for one pod; the largest of 1 that match has 0 rdma/hca"),
        ({"amd.com/gpu": 1}, "no node has 1 GPU for one pod; the largest of 1 that match has 0 GPUs"),
    ],
)
def test_no_node_is_large_enough(amounts: dict[str, int], words: str) -> None:
    found = short(one(amounts=amounts), [Node("n1", {}, {GPU: 4, "memory": 2**31})])
    assert (found.reason, found.message, found.in_vain) == ("NoSuchNode", words, True)


def test_amounts_that_are_there_but_on_different_nodes() -> None:
    nodes = [Node("n1", {}, {GPU: 8}), Node("n2", {}, {"memory": 2**31})]
    found = short(one(amounts={GPU: 8, "memory": 2**31}), nodes)
    assert found.message == "no node has 2Gi of memory for one pod; the largest of 2 that match has 2Gi of memory"


def test_nodes_that_take_no_new_pods() -> None:
    plain = node("n1", "b1", "r1", None, 8)
    nodes = [
        dataclasses.replace(plain, name="n1", cordoned=True),
        dataclasses.replace(plain, name="n2", cordoned=True),
        dataclasses.replace(plain, name="n3", ready=False),
        dataclasses.replace(plain, name="n4", taints=(Taint("dedicated", "train"),)),
        dataclasses.replace(plain, name="n5", taints=(Taint("node.kubernetes.io/memory-pressure"),)),
    ]
    found = short(one(), nodes)
    assert found.reason == "NodesUnusable"
    assert found.message == (
        "no node that is large enough takes new pods: 2 cordoned, 1 not ready, 1 tainted dedicated=train:NoSchedule, "
        "1 tainted node.kubernetes.io/memory-pressure:NoSchedule"
    )


def test_gpus_that_others_hold_are_named_with_their_holder() -> None:
    found = short(one(), [node("n1", "b1", "r7", "c1", 8, held=2), node("n2", "b1", "r7", "c1", 8, held=5)])
    assert found.reason == "Fragmented"
    assert "NVLink domain c1: the best node, n1, has room for 0 of 1 pods of 8 GPUs; 6 of 8 GPUs free" in str(found)
    assert "2 GPUs held by other/n1" in found.message
    assert "9 GPUs are free, but in pieces" in found.message


def test_groups_of_our_own_hold_too() -> None:
    groups = pool("ns/p", 0, 2, 8)
    found = short(groups, [node("n1", "b1", "r1", None, 8)])
    assert found.reason == "NotEnoughFree"
    assert found.message == (
        "rack r1: the best node, n1, has room for 0 of 1 pods of 8 GPUs; 0 of 8 GPUs free; 8 GPUs held by ns/p-decode-0"
    )


def test_a_tensor_unit_needs_one_nvlink_domain() -> None:
    nodes = [node(f"n{n}", "b1", "r1", f"c{n // 2}", 8) for n in range(4)]
    found = short(pool("ns/p", 0, 1, 8, pods=3, unit=3), nodes)
    assert found.reason == "TopologyUnmet"
    assert found.in_vain
    assert found.message == (
        "rack r1: the best NVLink domain, c0, has room for 2 of 3 pods of 8 GPUs that share every layer; "
        "16 of 16 GPUs free"
    )
    assert found.remedy == "free or add nodes in one NVLink domain, or loosen the pool's placement"
    assert not place(
        pool("ns/p", 0, 1, 8, pods=3, unit=3), nodes, {}, TOPOLOGY, {"ns/p": Constraints(tensor_required=False)}
    ).short


def test_a_whole_group_may_have_to_lie_together() -> None:
    nodes = [node(f"n{n}", "b1", f"r{n // 2}", None, 8) for n in range(4)]
    found = short(pool("ns/p", 0, 1, 8, pods=3), nodes, expert_required=True)
    assert "block b1: the best rack, r0, has room for 2 of 3 pods of 8 GPUs that must lie together" in found.message
    held = [node(f"n{n}", "b1", "r0", None, 8, held=8 * (n == 2)) for n in range(3)]
    found = short(pool("ns/p", 0, 1, 8, pods=3), held, expert_required=True)
    assert (found.reason, found.in_vain) == ("NotEnoughFree", False)


def test_too_few_nodes_even_when_they_are_empty() -> None:
    found = short(pool("ns/p", 0, 1, 8, pods=3), [node("n1", "b1", "r1", None, 8, held=8)])
    assert (found.reason, found.remedy, found.in_vain) == ("NotEnoughFree", "add nodes", True)
    assert found.message == "1 usable nodes hold 1 of 3 pods of 8 GPUs, even empty"


def test_a_group_without_gpus_says_what_it_asks_for() -> None:
    plain = Node("n1", {}, {"cpu": 1000, "pods": 1})
    found = short(
        [Gang("ns/g", "ns/p", "decode", amounts={"cpu": 600}), Gang("ns/h", "ns/p", "decode", amounts={"cpu": 600})],
        [plain],
    )
    assert found.message == (
        "the best node, n1, has room for 0 of 1 pods of 0.6 CPU; 0.4 of 1 CPU free; 0.6 CPU held by ns/g"
    )
    found = short([Gang(f"ns/{name}", "ns/p", "decode", amounts={"pods": 1}) for name in "ab"], [plain])
    assert "pods of any size" in found.message
