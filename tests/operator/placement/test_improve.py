"""Small moves that make the whole better, and that a bad move leaves no trace."""

from __future__ import annotations

from random import Random

import pytest

from bench.placement.cases import GPU, node, pool, small
from bench.placement.check import violations
from twinpool.core.topology import PRESETS, Weights, topology
from twinpool.operator.logic.placement import improve
from twinpool.operator.logic.placement.board import Board
from twinpool.operator.logic.placement.model import Constraints, Gang, Node
from twinpool.operator.logic.placement.place import place
from twinpool.operator.logic.placement.score import score
from twinpool.operator.logic.placement.tree import tree

TOPOLOGY = topology(PRESETS["topograph"])


def board(groups: list[Gang], nodes: list[Node], at: list[tuple[str, ...]], **wants: bool) -> Board:
    constraints = {group.pool: Constraints(**wants) for group in groups}  # type: ignore[arg-type]
    made = Board(tree(TOPOLOGY, nodes), groups, constraints, Weights())
    for group, names in zip(groups, at, strict=False):
        made.put(group, tuple(made.tree.number[name] for name in names))
    return made


def where(made: Board) -> dict[str, tuple[str, ...]]:
    return {name: tuple(made.tree.nodes[node].name for node in at) for name, at in made.places.items()}


def test_shares_grow_evenly() -> None:
    roles = [gang.role for gang in improve.interleaved(pool("p", 2, 6, 8))]
    assert [roles[:4].count("prefill"), roles[4:].count("prefill")] == [1, 1]


def test_a_pool_that_does_not_fit_leaves_the_board_as_it_was() -> None:
    groups = pool("p", 1, 2, 8)
    made = board(groups, [node(f"n{n}", "b", "r", None, 8) for n in range(2)], [])
    assert not improve.arrange(made, groups)
    assert made.places == {}
    assert made.free[GPU] == [8, 8]


def test_groups_without_gpus_are_arranged_too() -> None:
    groups = [Gang(f"g{n}", "p", "decode", amounts={"cpu": 1}) for n in range(3)]
    nodes = [Node(f"n{n}", {}, {"cpu": 1}) for n in range(100)]
    made = board(groups, nodes, [])
    assert improve.arrange(made, groups)
    assert len(set(made.places.values())) == 3


#: Two blocks of one rack each.
PAIRS = [node(f"n{n}", f"b{n // 2}", f"r{n // 2}", f"c{n // 2}", 8) for n in range(4)]


def test_two_pools_that_are_crossed_are_uncrossed() -> None:
    groups = [*pool("p", 1, 1, 8), *pool("q", 1, 1, 8)]
    made = board(groups, PAIRS, [("n0",), ("n2",), ("n1",), ("n3",)])
    improve.improve(made, groups)
    together = {frozenset(where(made)[f"{name}-{role}-0"][0] for role in ("prefill", "decode")) for name in "pq"}
    assert together == {frozenset(("n0", "n1")), frozenset(("n2", "n3"))}


def test_groups_that_ask_for_the_same_change_places() -> None:
    groups = [*pool("p", 1, 1, 8), *pool("q", 1, 1, 8)]
    made = board(groups, PAIRS, [("n0",), ("n2",), ("n1",), ("n3",)])
    assert improve._swap(made, (groups[1], groups[2]))
    assert where(made)["p-decode-0"] == ("n1",)
    assert not improve._swap(made, (groups[1], groups[2])), "they change back only if that is better"
    assert where(made)["p-decode-0"] == ("n1",)


def test_no_change_of_places_breaks_a_hard_rule() -> None:
    (loose,) = pool("p", 0, 1, 8, pods=2, unit=2)
    (tight,) = pool("q", 0, 1, 8, pods=2, unit=2)
    constraints = {"p": Constraints(tensor_required=False), "q": Constraints()}
    made = Board(tree(TOPOLOGY, [*PAIRS, node("n4", "b1", "r1", "c1", 8)]), [loose, tight], constraints, Weights())
    made.put(loose, (1, 4))
    made.put(tight, (2, 3))
    assert not improve._swap(made, (loose, tight))
    assert made.places == {"p-decode-0": (1, 4), "q-decode-0": (2, 3)}


def test_a_group_that_is_in_the_way_goes_elsewhere() -> None:
    groups = [*pool("p", 1, 1, 8), *pool("q", 0, 1, 8)]
    made = board(groups, PAIRS, [("n0",), ("n2",), ("n1",)])
    assert improve._force(made, groups, groups[1], made.tree.leaf[1])
    assert where(made)["p-decode-0"] == ("n1",)
    assert where(made)["q-decode-0"] in (("n2",), ("n3",))
    assert not improve._force(made, groups, groups[1], made.tree.leaf[1]), "it is there"


def test_a_group_that_cannot_be_had_in_a_domain_stays() -> None:
    groups = pool("p", 1, 1, 8)
    held = [*PAIRS[:3], node("n3", "b1", "r1", "c1", 8, held=8)]
    made = board(groups, held, [("n0",), ("n1",)])
    assert not improve._force(made, groups, groups[1], made.tree.leaf[3])
    assert where(made) == {"p-prefill-0": ("n0",), "p-decode-0": ("n1",)}


@pytest.mark.parametrize("seed", [5, 17, 33, 40, 50])
def test_the_whole_search_keeps_the_rules_and_gains(seed: int) -> None:
    case = small(Random(seed))
    question = case.groups, case.nodes, {}, case.topology, case.constraints
    plain, best = place(*question, effort=0), place(*question)
    assert violations(case, best) == []
    assert set(plain.short) == set(best.short)
    domains = tree(case.topology, case.nodes)
    values = [score(case.groups, found.places, domains, case.constraints, Weights()).total for found in (plain, best)]
    assert values[1] <= values[0] + 1e-9


def test_effort_is_bounded() -> None:
    groups = pool("p", 2, 6, 2)
    nodes = [node(f"n{n}", f"b{n // 2}", f"r{n // 2}", None, 4) for n in range(6)]
    made = board(groups, nodes, [("n0",), ("n0",), *[(f"n{n}",) for n in (1, 1, 2, 2, 3, 3)]])
    before = len(made.log)
    improve.improve(made, groups, effort=10)
    assert len(made.log) - before < 8 * improve.EACH + 200


def test_many_groups_are_moved_one_by_one_only() -> None:
    groups = pool("p", 0, improve.PAIRED + 1, 1)
    nodes = [node(f"n{n}", f"b{n % 3}", f"r{n % 3}", None, 8) for n in range(9)]
    made = board(groups, nodes, [("n0",)] * 8 + [("n3",)] * 8 + [("n6",)] * 8 + [("n1",)])
    cost = made.cost("p")
    improve.improve(made, groups)
    assert made.cost("p") < cost


def test_in_a_large_cluster_a_pool_begins_in_the_fullest_domain_that_holds_it_at_each_level() -> None:
    groups = pool("p", 1, 1, 2)
    nodes = [node(f"n{n}", f"b{n // 50}", f"r{n // 5}", None, 8, held=8 * (n % 5 > 0)) for n in range(100)]
    made = board(groups, nodes, [])
    names = [made.tree.name[domain] for domain in improve._seeds(made, groups)]
    assert names == ["cluster", "b0", "r0", "n0"]
    (large,) = pool("q", 0, 1, 8, pods=2)
    made = board([large], nodes, [])
    assert [made.tree.name[domain] for domain in improve._seeds(made, [large])] == ["cluster", "b0"]
