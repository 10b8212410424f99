"""Moves are proposed only when they pay, and each is one that the operator could make while the group serves."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.placement.cases import Case, node, pool, small
from bench.placement.check import violations
from twinpool.core.topology import PRESETS, topology
from twinpool.operator.logic.placement.defragment import MOST, Move, Question, defragment
from twinpool.operator.logic.placement.model import Assignment, Constraints, Gang, Node
from twinpool.operator.logic.placement.place import place

TOPOLOGY = topology(PRESETS["topograph"])
RACKS = [node(f"n{n}", f"b{n // 4}", f"r{n // 2}", None, 8) for n in range(8)]


def moves(groups: list[Gang], nodes: list[Node], places: dict[str, tuple[str, ...]], **more: float) -> list[Move]:
    wants = {group.pool: Constraints(tensor_required=False) for group in groups}
    return defragment(Question(groups, nodes, TOPOLOGY, wants), places, **more)


def test_a_torn_tensor_unit_is_brought_together() -> None:
    (group,) = pool("p", 0, 1, 8, pods=2, unit=2)
    (move,) = moves([group], RACKS, {group.name: ("n0", "n7")})
    assert move.here == ("n0", "n7")
    assert move.there == ("n2", "n3"), "its own nodes are not free before it has gone"
    assert move.wins > 0.05 * 16
    assert move.before.tensor > move.after.tensor


def test_what_lies_well_stays() -> None:
    groups = pool("p", 1, 1, 8)
    places = {"p-prefill-0": ("n0",), "p-decode-0": ("n1",)}
    assert moves(groups, RACKS, places) == []


def test_a_small_gain_does_not_pay() -> None:
    groups = pool("p", 1, 1, 8)
    far = {"p-prefill-0": ("n0",), "p-decode-0": ("n7",)}
    (move,) = moves(groups, RACKS, far)
    assert move.wins == pytest.approx(move.before.total - move.after.total)
    assert moves(groups, RACKS, far, least=move.wins / 8 + 0.01) == []


def test_nothing_moves_to_where_there_is_no_room() -> None:
    (group,) = pool("p", 0, 1, 8, pods=2)
    full = [node(f"n{n}", "b", f"r{n}", None, 8) for n in range(2)]
    assert moves([group], full, {group.name: ("n0", "n1")}) == []


def test_groups_without_a_whole_place_are_left_alone() -> None:
    groups = pool("p", 0, 4, 8, pods=2)
    places = {groups[0].name: ("n0",), groups[1].name: ("n0", "gone"), groups[2].name: ("n1", "n7")}
    assert {move.gang for move in moves(groups, RACKS, places)} == {groups[2].name}


def test_each_group_moves_once_and_a_proposal_is_bounded() -> None:
    count = MOST + 2
    nodes = [node(f"n{n}", f"b{n}", f"r{n}", None, 8) for n in range(2 * count)]
    nodes += [node(f"m{n}", f"c{n // 2}", f"s{n // 2}", None, 8) for n in range(2 * count)]
    groups = [group for number in range(count) for group in pool(f"p{number}", 0, 1, 8, pods=2)]
    places = {group.name: (f"n{2 * n}", f"n{2 * n + 1}") for n, group in enumerate(groups)}
    found = moves(groups, nodes, places)
    assert len({move.gang for move in found}) == len(found) == MOST
    assert all(move.wins > 0 for move in found)


@settings(max_examples=20)
@given(st.integers(0, 2**32).map(lambda seed: small(Random(seed))), st.randoms(use_true_random=False))
def test_every_step_is_a_valid_layout_that_is_better(case: Case, random: Random) -> None:
    """From any valid layout; here from that of other weights, which is seldom the best."""
    shuffled = list(case.groups)
    random.shuffle(shuffled)
    first = place(shuffled, case.nodes, {}, case.topology, case.constraints, effort=0)
    there = [group for group in case.groups if group.name in first.places]
    question = Question(there, case.nodes, case.topology, case.constraints)
    where = dict(first.places)
    last = None
    for move in defragment(question, first.places, least=0.01):
        assert where[move.gang] == move.here
        assert last is None or move.before.total == pytest.approx(last)
        where[move.gang], last = move.there, move.after.total
        assert move.wins > 0
        settled = Case(tuple(there), case.nodes, case.constraints, topology=case.topology)
        assert violations(settled, Assignment(where)) == []
