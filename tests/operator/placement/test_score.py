"""The objective, on placements whose value can be worked out by hand."""

from __future__ import annotations

import pytest

from bench.placement.cases import GPU, node, pool
from twinpool.core.topology import PRESETS, Weights, topology
from twinpool.operator.logic.placement.model import Constraints, Gang, Node
from twinpool.operator.logic.placement.score import Score, score
from twinpool.operator.logic.placement.tree import tree

TOPOLOGY = topology(PRESETS["topograph"])
NODES = [node(f"n{n}", f"b{n // 4}", f"r{n // 2}", None, 8) for n in range(8)]


def value(groups: list[Gang], places: dict[str, tuple[str, ...]], nodes: list[Node] = NODES, **weights: float) -> Score:
    wants = {group.pool: Constraints() for group in groups}
    return score(groups, places, tree(TOPOLOGY, nodes), wants, Weights(**weights))  # type: ignore[arg-type]


def at(groups: list[Gang], *names: str) -> dict[str, tuple[str, ...]]:
    return {group.name: (name,) for group, name in zip(groups, names, strict=True)}


def test_kv_is_priced_by_what_has_to_leave_each_domain() -> None:
    groups = pool("p", 2, 2, 8)
    balanced = value(groups, at(groups, "n0", "n4", "n1", "n5"))
    split = value(groups, at(groups, "n0", "n1", "n4", "n5"))
    price = TOPOLOGY.price
    host, rack, block = price(TOPOLOGY.host), price(TOPOLOGY.index("rack")), price(TOPOLOGY.index("block"))
    assert balanced.handoff == pytest.approx(0.3 * 32 * (rack - host)), "each rack serves alone"
    assert split.handoff == pytest.approx(0.3 * 32 * (1.0 - host)), "everything crosses between the blocks"
    assert (balanced.pair, split.pair) == (0.0, pytest.approx(0.1 * 32))
    near = value(groups, at(groups, "n0", "n2", "n1", "n4"))
    assert near.handoff == pytest.approx(0.3 * 32 * ((rack - host) / 2 + (1.0 - host) / 2))
    assert block < 1.0


def test_a_pool_of_one_role_hands_nothing_over() -> None:
    groups = pool("p", 0, 2, 8)
    assert value(groups, at(groups, "n0", "n4")).handoff == 0.0


def test_what_goes_with_one_failure_domain() -> None:
    groups = pool("p", 0, 4, 8)
    assert value(groups, at(groups, "n0", "n2", "n4", "n6")).spread == 0.0
    assert value(groups, at(groups, "n0", "n1", "n4", "n6")).spread == pytest.approx(0.2 * 32 * (6 - 4) / 16)
    assert value(groups, at(groups, "n0", "n1", "n2", "n3")).spread == pytest.approx(0.2 * 32 * (8 - 4) / 16)


def test_groups_over_several_nodes_pay_for_their_widest_link() -> None:
    (group,) = pool("p", 0, 1, 8, pods=2, unit=2)
    rack, cluster = value([group], {group.name: ("n0", "n1")}), value([group], {group.name: ("n0", "n4")})
    price = TOPOLOGY.price(TOPOLOGY.index("rack"))
    assert (rack.tensor, rack.span) == (pytest.approx(16 * price), pytest.approx(0.3 * 16 * price))
    assert (cluster.tensor, cluster.span) == (pytest.approx(16.0), pytest.approx((0.3 + 0.2) * 16))


def test_free_gpus_in_opened_domains_are_stranded() -> None:
    groups = [*pool("p", 0, 1, 2), Gang("cpu", "p", "decode", amounts={"cpu": 1})]
    places = {groups[0].name: ("n0",), "cpu": ("n5",)}
    assert value(groups, places).stranded == pytest.approx(0.25 * 6 + 0.02 * 14)
    cordoned = [Node("n0", {}, {GPU: 8}, cordoned=True), *NODES[1:]]
    assert value(groups, places, cordoned).stranded == 0.0, "nothing can go there anyway"


def test_the_total_is_the_sum() -> None:
    assert (Score(1, 2, 3, 4, 5, 6) + Score(1, 1, 1, 1, 1, 1)).total == 27
