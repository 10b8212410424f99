"""Groups that only new nodes can hold: what their pods require, and what the decision makes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench.placement.cases import GPU, node
from twinpool.core import protocol
from twinpool.core.topology import PRESETS, topology
from twinpool.operator.logic.placement.affinity import terms
from twinpool.operator.logic.placement.growth import MOST_AVOIDED, affinity_for, growth, without
from twinpool.operator.logic.placement.model import Constraints, Gang, Growth, Match
from twinpool.operator.logic.placement.tree import Tree, tree

CLIQUE, LEAF = "nvidia.com/gpu.clique", "network.topology.nvidia.com/leaf"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
WANTS = Constraints()


def domains(count: int = 2, preset: str = "topograph", size: int = 8) -> Tree:
    return tree(topology(PRESETS[preset]), [node(f"n{n}", "b", f"r{n}", f"c{n}", size) for n in range(count)])


def gang(pods: int = 3, unit: int = 3, **changes: Any) -> Gang:
    return Gang("t/a", "t/p", "decode", pods, unit, {GPU: 8}, GPU, **changes)


def test_a_tensor_unit_grows_in_the_level_that_must_hold_it() -> None:
    assert growth(gang(), WANTS, domains()) == Growth(CLIQUE, ("n0", "n1"))


def test_a_group_of_stages_needs_only_what_is_required() -> None:
    stages = gang(unit=1)
    assert growth(stages, WANTS, domains()) == Growth("", ("n0", "n1"))
    together = dataclasses.replace(WANTS, expert_required=True)
    assert growth(stages, together, domains()) == Growth(LEAF, ("n0", "n1"))
    assert growth(gang(), together, domains()) == Growth(CLIQUE, ("n0", "n1")), "the narrower one holds both"
    wished = dataclasses.replace(WANTS, tensor_required=False)
    assert growth(gang(pods=4, unit=2), wished, domains()) == Growth("", ("n0", "n1"))


def test_what_one_affinity_cannot_say_is_not_shown() -> None:
    assert growth(gang(pods=4, unit=2), WANTS, domains()) is None, "two units"
    assert growth(gang(), WANTS, domains(preset="hostname")) is None, "a host holds no unit of several pods"
    assert growth(gang(), WANTS, domains(preset="eks")) == Growth(CLIQUE, ("n0", "n1")), "the label that is there"
    bare = tree(topology(PRESETS["eks"]), [dataclasses.replace(node("n0", "b", "r", "c", 8), labels={})])
    assert growth(gang(), WANTS, bare) is None


def test_only_nodes_that_could_hold_a_pod_are_avoided_and_never_many() -> None:
    assert growth(gang(), WANTS, domains(size=4)) == Growth(CLIQUE)
    assert growth(gang(selector={"x": "y"}), WANTS, domains()) == Growth(CLIQUE)
    many = growth(gang(), WANTS, domains(MOST_AVOIDED + 1))
    assert many == Growth(CLIQUE)


@pytest.mark.parametrize("grown", [Growth("k", ("a", "b")), Growth(""), Growth("k"), Growth("", ("a",))])
def test_growth_is_noted_and_read(grown: Growth) -> None:
    assert Growth.read(str(grown)) == grown


def test_pods_lie_in_one_domain_and_keep_away_from_nodes() -> None:
    made = affinity_for(None, "g", Growth("k", ("a", "b")))
    (term,) = made["podAffinity"][REQUIRED]
    assert term == {"labelSelector": {"matchLabels": {protocol.LABEL_GROUP: "g"}}, "topologyKey": "k"}
    away = tuple(Match("metadata.name", "NotIn", (name,), field=True) for name in "ab")
    assert terms(made) == (away,)
    assert affinity_for(None, "g", Growth("")) == {}


def test_a_users_own_affinity_stays_and_is_what_counts() -> None:
    own = {
        "podAffinity": {REQUIRED: ["mine"]},
        "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [{"key": "x", "operator": "Exists"}]}]}},
    }
    grown = Growth("k", ("a",))
    made = affinity_for(own, "g", grown)
    assert made["podAffinity"][REQUIRED][0] == "mine"
    assert len(made["podAffinity"][REQUIRED]) == 2
    (term,) = terms(made)
    assert term == (Match("x", "Exists"), Match("metadata.name", "NotIn", ("a",), field=True))
    assert without(gang(terms=terms(made)), grown).terms == ((Match("x", "Exists"),),)
    assert without(gang(terms=terms(affinity_for(None, "g", grown))), grown).terms == ()
