"""Wishes that a layout does not keep, by how much, and in which order."""

from __future__ import annotations

import pytest

from bench.placement.cases import node, pool
from twinpool.core.topology import PRESETS, Weights, topology
from twinpool.operator.logic.placement.compromise import Compromise, Layout, compromises
from twinpool.operator.logic.placement.model import Constraints, Gang
from twinpool.operator.logic.placement.place import place
from twinpool.operator.logic.placement.score import score
from twinpool.operator.logic.placement.tree import tree

TOPOLOGY = topology(PRESETS["topograph"])
#: Two blocks of two racks of two nodes with eight GPUs, two racks to a block.
NODES = [node(f"n{n}", f"b{n // 4}", f"r{n // 2}", None, 8) for n in range(8)]
LOOSE = Constraints(tensor="rack", tensor_required=False)


def told(
    groups: list[Gang],
    places: dict[str, tuple[str, ...]],
    wants: Constraints = LOOSE,
    slow: frozenset[frozenset[str]] = frozenset(),
) -> list[Compromise]:
    return compromises(Layout(groups, places, tree(TOPOLOGY, NODES), wants, Weights(), slow))


def test_what_is_kept_is_not_told() -> None:
    groups = pool("p", 1, 2, 8)
    places = dict(zip((group.name for group in groups), (("n0",), ("n1",), ("n3",)), strict=True))
    assert told(groups, places) == []
    assert told(groups, {}) == [], "groups without a place keep no wish and break none"


def test_every_wish_is_told_in_the_order_of_its_worth() -> None:
    torn, *_ = pool("p", 0, 1, 8, pods=2, unit=2)
    fed, near, far = pool("p", 1, 2, 8)
    groups = [
        torn,
        *(
            Gang(f"x{at}", "p", each.role, 1, 1, each.amounts, each.accelerator)
            for at, each in enumerate((fed, near, far))
        ),
    ]
    places = {torn.name: ("n0", "n4"), "x0": ("n1",), "x1": ("n6",), "x2": ("n7",)}
    found = told(groups, places, slow=frozenset({frozenset({"n0", "n4"})}))
    assert [item.wish for item in found] == ["tensor", "slow", "expert", "pair", "spread"]
    assert "1 of 1 tensor-parallel units of" in found[0].words
    assert found[0].words.endswith("span cluster, wanted within rack")
    assert found[0].cost == pytest.approx(16 * (1.0 - TOPOLOGY.price(TOPOLOGY.index("rack"))))
    assert found[1].cost == 16.0
    rack = TOPOLOGY.price(TOPOLOGY.index("rack"))
    assert found[2].cost == pytest.approx(16 * (0.3 + 0.2 - 0.3 * rack))
    assert "of the KV cache leaves its block" in found[3].words
    assert found[4].words == "2 of 3 decode groups fail with rack r3"
    terms = score(groups, places, tree(TOPOLOGY, NODES), {"p": LOOSE}, Weights())
    assert found[3].cost == pytest.approx(terms.pair)
    assert found[4].cost == pytest.approx(terms.spread)


def test_a_unit_that_lies_together_breaks_nothing() -> None:
    (group,) = pool("p", 0, 1, 8, pods=4, unit=2)
    (found,) = told([group], {group.name: ("n0", "n1", "n4", "n5")})
    assert found.wish == "expert", "its units are whole, and the group spans blocks"


def test_each_block_gets_prefill_and_decode_in_the_pools_own_ratio() -> None:
    """So each can serve alone when the other is lost."""
    groups = pool("p", 2, 6, 8)
    found = place(groups, NODES, {}, TOPOLOGY, {"p": Constraints()})
    assert not found.short
    for block in ("b0", "b1"):
        inside = {f"n{n}" for n in range(8) if f"b{n // 4}" == block}
        roles = [group.role for group in groups if inside.issuperset(found.places[group.name])]
        assert sorted(roles) == ["decode"] * 3 + ["prefill"]
