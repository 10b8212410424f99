"""What always holds of placement, over random clusters and pools."""

from __future__ import annotations

import dataclasses
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.placement.cases import Case, small
from bench.placement.check import violations
from twinpool.core.topology import Weights
from twinpool.operator.logic.placement import score
from twinpool.operator.logic.placement.board import Board
from twinpool.operator.logic.placement.place import place
from twinpool.operator.logic.placement.tree import tree

if TYPE_CHECKING:
    from twinpool.operator.logic.placement.model import Assignment, SlowLinks

few = settings(max_examples=20)
cases = st.integers(0, 2**32).map(lambda seed: small(Random(seed)))


def answer(case: Case) -> Assignment:
    return place(case.groups, case.nodes, case.placed, case.topology, case.constraints, effort=500)


@few
@given(cases)
def test_groups_are_whole_within_capacity_and_where_they_must_be(case: Case) -> None:
    assert violations(case, answer(case)) == []


@few
@given(cases, st.randoms(use_true_random=False))
def test_equal_input_gives_equal_output_whatever_the_order_of_nodes(case: Case, random: Random) -> None:
    shuffled = list(case.nodes)
    random.shuffle(shuffled)
    assert answer(case) == answer(dataclasses.replace(case, nodes=tuple(shuffled)))


@few
@given(cases)
def test_what_has_a_place_keeps_it(case: Case) -> None:
    first = answer(case)
    again = answer(dataclasses.replace(case, placed=dict(first.places)))
    assert again.places == first.places
    assert set(again.short) == set(first.short)


@few
@given(cases, st.randoms(use_true_random=False))
def test_without_a_node_only_the_groups_on_it_move(case: Case, random: Random) -> None:
    first = answer(case)
    lost = random.choice(case.nodes).name
    left = tuple(node for node in case.nodes if node.name != lost)
    again = answer(dataclasses.replace(case, nodes=left, placed=dict(first.places)))
    for name, nodes in first.places.items():
        if lost not in nodes:
            assert again.places[name] == nodes


def links(case: Case, random: Random) -> SlowLinks:
    """Return some links between nodes, and inside some."""
    names = [node.name for node in case.nodes]
    return frozenset(frozenset(random.choices(names, k=2)) for _ in range(3))


@few
@given(cases, st.randoms(use_true_random=False))
def test_slow_links_change_where_groups_go_and_never_whether(case: Case, random: Random) -> None:
    slow = links(case, random)
    wary = place(case.groups, case.nodes, {}, case.topology, case.constraints, effort=500, slow=slow)
    assert set(wary.short) == set(answer(case).short)
    assert violations(case, wary) == []


@few
@given(cases, st.randoms(use_true_random=False))
def test_the_running_sums_are_the_objective(case: Case, random: Random) -> None:
    weights, domains = Weights(), tree(case.topology, case.nodes)
    places = answer(case).places
    slow = links(case, random)
    board = Board(domains, case.groups, case.constraints, weights, slow)
    empty = score.score(case.groups, {}, domains, case.constraints, weights).total
    for group in case.groups:
        if group.name in places:
            board.put(group, tuple(domains.number[node] for node in places[group.name]))
    total = score.score(case.groups, places, domains, case.constraints, weights, slow).total
    running = board.stranding + sum(pool.cost() for pool in board.pools.values())
    assert running == pytest.approx(total - empty, abs=1e-6)
    for group in case.groups:
        if group.name in places:
            board.drop(group)
    assert board.stranding == pytest.approx(0.0, abs=1e-6)
