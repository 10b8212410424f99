"""Links that were measured too slow are avoided as long as another place costs less than they do."""

from __future__ import annotations

import pytest

from bench.placement.cases import node, pool
from twinpool.core.topology import PRESETS, Weights, topology
from twinpool.operator.logic.placement.model import Assignment, Constraints, Gang, Node
from twinpool.operator.logic.placement.place import place
from twinpool.operator.logic.placement.score import score
from twinpool.operator.logic.placement.tree import tree

TOPOLOGY = topology(PRESETS["topograph"])
RACK = [node(f"n{n}", "b", "r", None, 8) for n in range(3)]


def answer(groups: list[Gang], nodes: list[Node], *slow: set[str]) -> Assignment:
    links = frozenset(map(frozenset, slow))
    return place(groups, nodes, {}, TOPOLOGY, {"p": Constraints(tensor_required=False)}, slow=links)


def test_a_group_goes_round_a_slow_link() -> None:
    (group,) = pool("p", 0, 1, 8, pods=2, unit=2)
    assert answer([group], RACK).places[group.name] == ("n0", "n1")
    assert answer([group], RACK, {"n0", "n1"}).places[group.name] == ("n0", "n2")
    assert set(answer([group], RACK, {"n0", "n1"}, {"n0", "n2"}).places[group.name]) == {"n1", "n2"}


def test_a_slow_link_is_better_than_no_place() -> None:
    (group,) = pool("p", 0, 1, 8, pods=2)
    found = answer([group], RACK[:2], {"n0", "n1"})
    assert found.places[group.name] == ("n0", "n1")
    told = score(
        [group],
        found.places,
        tree(TOPOLOGY, RACK),
        {"p": Constraints()},
        Weights(),
        frozenset({frozenset({"n0", "n1"})}),
    )
    assert told.slow == 16.0


def test_another_rack_is_better_than_a_slow_link() -> None:
    (group,) = pool("p", 0, 1, 8, pods=2)
    far = [RACK[0], RACK[1], node("n8", "b", "r2", None, 8)]
    assert set(answer([group], far, {"n0", "n1"}).places[group.name]) in ({"n0", "n8"}, {"n1", "n8"})


def test_slow_links_inside_a_node_matter_to_pods_of_several_gpus() -> None:
    (one,), (many,) = pool("p", 0, 1, 1), pool("p", 0, 1, 2)
    assert answer([many], RACK, {"n0"}).places[many.name] == ("n1",)
    assert answer([one], RACK, {"n0"}).places[one.name] == ("n0",)


def test_links_of_nodes_that_are_gone_are_nobody_s_business() -> None:
    (group,) = pool("p", 0, 1, 8, pods=2)
    assert answer([group], RACK, {"n0", "gone"}).places[group.name] == ("n0", "n1")


@pytest.mark.parametrize("slow", [{"n0", "n1"}, {"n150", "n151"}])
def test_of_many_racks_one_with_a_slow_link_looks_like_no_other(slow: set[str]) -> None:
    (group,) = pool("p", 0, 1, 8, pods=2)
    nodes = [node(f"n{n}", "b", f"r{n // 2}", None, 8) for n in range(200)]
    assert not slow <= set(answer([group], nodes, slow).places[group.name])
