"""The exhaustive search finds what best-fit misses, respects every hard rule, and ends."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from bench.placement.cases import GPU, node, pool
from twinpool.core.topology import PRESETS, Weights, topology
from twinpool.operator.logic.placement import place as placing
from twinpool.operator.logic.placement.board import Board
from twinpool.operator.logic.placement.model import Constraints, Gang, Node
from twinpool.operator.logic.placement.place import place
from twinpool.operator.logic.placement.search import Budget, fit
from twinpool.operator.logic.placement.tree import tree

if TYPE_CHECKING:
    import pytest

TOPOLOGY = topology(PRESETS["topograph"])


def sized(*gpus: int) -> list[Gang]:
    """Return groups of a pool that ask for these GPUs; an even spread of them matters less than that they fit."""
    return [Gang(f"g{n}", "p", "decode", amounts={GPU: count}, accelerator=GPU) for n, count in enumerate(gpus)]


def found(
    groups: list[Gang], nodes: list[Node], states: int = 10_000, **wants: bool
) -> dict[str, tuple[int, ...]] | None:
    constraints = {group.pool: Constraints(**wants) for group in groups}  # type: ignore[arg-type]
    return fit(Board(tree(TOPOLOGY, nodes), groups, constraints, Weights()), groups, Budget(states))


NODES = [node(f"n{n}", "b", "r", None, 8) for n in range(3)]


def test_a_tight_packing_is_found() -> None:
    places = found(sized(3, 3, 2, 4, 4, 5, 3), NODES)
    assert places is not None
    assert found(sized(3, 3, 2, 4, 4, 5, 4), NODES) is None
    assert found(sized(5, 5, 5, 5), NODES) is None


def test_what_can_never_fit_is_told_without_looking() -> None:
    assert found(sized(9), NODES, states=0) is None


def test_the_search_ends_when_its_budget_does() -> None:
    assert found(sized(3, 3, 2, 4, 4, 5, 3), NODES, states=2) is None


def test_units_and_whole_groups_stay_together() -> None:
    (group,) = pool("p", 0, 1, 8, pods=4, unit=2)
    nodes = [node(f"n{n}", "b", f"r{n // 4}", f"c{n // 2}", 8, held=8 * (n in (1, 4))) for n in range(8)]
    places = found([group], nodes)
    assert places is not None
    assert [nodes[at].labels["nvidia.com/gpu.clique"] for at in places[group.name]] in (
        ["c1", "c1", "c3", "c3"],
        ["c3", "c3", "c1", "c1"],
    )
    assert found([group], nodes, expert_required=True) is None
    assert found([group], nodes, expert_required=True, tensor_required=False) is None
    assert found([group], [*nodes, node("n8", "b", "r1", None, 8)], expert_required=True, tensor_required=False)


def test_pods_of_units_of_one_may_lie_anywhere() -> None:
    (group,) = pool("p", 0, 1, 8, pods=3)
    assert found([group], NODES) == {group.name: (0, 1, 2)}
    (loose,) = pool("p", 0, 1, 8, pods=3, unit=3)
    assert found([loose], NODES, tensor_required=False) == {loose.name: (0, 1, 2)}


def test_groups_that_were_put_down_already_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [dataclasses.replace(gang, pool=f"p{gang.name}") for gang in sized(6, 4, 1, 2, 3)]
    constraints = {gang.pool: Constraints(spread="host") for gang in groups}
    assert not place(groups, NODES[:2], {}, TOPOLOGY, constraints).short
    monkeypatch.setattr(placing, "SEARCHED", 0)
    assert list(place(groups, NODES[:2], {}, TOPOLOGY, constraints).short) == ["g4"], "best-fit alone misses it"
