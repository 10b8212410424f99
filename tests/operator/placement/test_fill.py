"""Where one more group goes while all others stay."""

from __future__ import annotations

import pytest

from bench.placement.cases import node, pool
from twinpool.core.topology import PRESETS, Weights, topology
from twinpool.operator.logic.placement.board import Board
from twinpool.operator.logic.placement.fill import best_place, insert
from twinpool.operator.logic.placement.model import Constraints, Gang, Node
from twinpool.operator.logic.placement.tree import natural, tree

TOPOLOGY = topology(PRESETS["topograph"])


def board(groups: list[Gang], nodes: list[Node], **wants: bool) -> Board:
    constraints = {group.pool: Constraints(**wants) for group in groups}  # type: ignore[arg-type]
    return Board(tree(TOPOLOGY, nodes), groups, constraints, Weights())


def placed(made: Board, group: Gang, within: int = 0) -> list[str] | None:
    nodes = best_place(made, group, within)
    return nodes and [made.tree.nodes[node].name for node in nodes]  # type: ignore[return-value]


def test_names_sort_as_people_count() -> None:
    assert sorted(["n10", "n9", "n", "m2", "10", "9"], key=natural) == ["9", "10", "m2", "n", "n9", "n10"]


def test_a_small_pod_goes_to_the_node_that_is_open_already() -> None:
    (group,) = pool("p", 0, 1, 2)
    nodes = [node("n1", "b", "r1", None, 8), node("n2", "b", "r2", None, 8, held=6), node("n3", "b", "r2", None, 8)]
    assert placed(board([group], nodes), group) == ["n2"]


def test_a_group_stays_within_the_narrowest_domain_that_holds_it() -> None:
    (group,) = pool("p", 0, 1, 8, pods=2)
    nodes = [node(f"n{n}", "b", f"r{n // 2}", None, 8) for n in range(1, 5)]
    assert placed(board([group], nodes), group) == ["n2", "n3"]


def test_two_pods_of_a_group_may_share_a_node() -> None:
    (group,) = pool("p", 0, 1, 4, pods=2)
    assert placed(board([group], [node("n1", "b", "r", None, 8)]), group) == ["n1", "n1"]


def test_one_of_many_racks_that_look_alike_is_tried() -> None:
    (group,) = pool("p", 0, 1, 8, pods=2)
    nodes = [node(f"n{n}", "b", f"r{n // 3}", None, 8) for n in range(300)]
    nodes[151] = node("n151", "b", "r50", None, 8, held=8)
    assert placed(board([group], nodes), group) == ["n150", "n152"], "the rack that is open already"


def test_broader_domains_are_not_tried_without_end() -> None:
    (group,) = pool("p", 0, 1, 8, pods=2)
    nodes = [node(f"n{n}", f"b{n // 4}", f"r{n // 4}", f"c{n // 2}", 8) for n in range(160)]
    assert placed(board([group], nodes), group) == ["n0", "n1"]


def test_tensor_units_may_lie_apart_but_not_be_torn() -> None:
    (group,) = pool("p", 0, 1, 8, pods=4, unit=2)
    cliques = ("a", "a", "b", "b", "c")
    nodes = [node(f"n{n}", "b", "r", clique, 8) for n, clique in enumerate(cliques)]
    assert placed(board([group], nodes), group) == ["n0", "n1", "n2", "n3"]
    torn = [node(f"n{n}", "b", "r", clique, 8) for n, clique in enumerate("aaabcd")]
    assert placed(board([group], torn), group) is None
    made = board([group], torn, tensor_required=False)
    assert len(placed(made, group) or ()) == 4
    assert made.stranding == pytest.approx(0.0)


def test_a_group_can_be_kept_inside_a_domain() -> None:
    (group,) = pool("p", 0, 1, 8, pods=2)
    nodes = [node(f"n{n}", f"b{n // 2}", f"r{n // 2}", None, 8) for n in range(4)]
    made = board([group], nodes)
    inside = made.tree.chain[2][1]
    assert placed(made, group, inside) == ["n2", "n3"]
    assert placed(made, group, made.tree.leaf[0]) is None
    assert insert(made, group, inside)
    assert made.places == {group.name: (2, 3)}


def test_decode_goes_near_the_prefill_that_feeds_it() -> None:
    prefill, decode = pool("p", 1, 1, 8)
    nodes = [node("n0", "b0", "r0", None, 8, held=8), node("n1", "b0", "r0", None, 8)]
    nodes += [node(f"n{n}", "b1", "r1", None, 8) for n in (2, 3)]
    made = board([prefill, decode], nodes)
    made.put(prefill, (2,))
    assert placed(made, decode) == ["n3"], "though n1 lies in a rack that is open already"
