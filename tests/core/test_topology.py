"""Levels, presets, and labels that are missing or contradict each other."""

import pytest

from twinpool.core.errors import InvalidValue
from twinpool.core.topology import (
    CLUSTER,
    HOST,
    NAMES,
    PRESETS,
    Level,
    Topology,
    parse,
    paths,
    preset,
    topology,
)

ZONE, SPINE = "topology.kubernetes.io/zone", "network.topology.nvidia.com/spine"
LEAF, CLIQUE = "network.topology.nvidia.com/leaf", "nvidia.com/gpu.clique"


def level(name: str, *labels: str, bandwidth: float = 1e9) -> Level:
    return Level(name, labels or ((f"label/{name}",) if name not in (CLUSTER, HOST) else ()), bandwidth, 0.0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_go_from_the_cluster_to_the_node(name: str) -> None:
    made = topology(PRESETS[name])
    names = [level.name for level in made.levels]
    assert names[0] == CLUSTER
    assert names[made.host] == HOST
    assert names[1:] == [level for level in NAMES if level in names]
    prices = [made.price(index) for index in range(len(names))]
    assert prices == sorted(prices, reverse=True)
    assert prices[0] == 1.0


@pytest.mark.parametrize(
    ("levels", "problem"),
    [
        ((level(CLUSTER), level("shelf"), level(HOST)), "'shelf' is unknown"),
        ((level(CLUSTER), level("rack"), level("block"), level(HOST)), "cluster, rack, block, host"),
        ((level(CLUSTER), level("rack"), level("rack"), level(HOST)), "cluster, rack, rack, host"),
        ((level("rack"), level(HOST)), "levels are rack, host"),
        ((level(CLUSTER), level("rack")), "levels are cluster, rack"),
        ((level(CLUSTER), Level("rack", (), 1.0, 0.0), level(HOST)), "rack has no node label"),
        ((level(CLUSTER), level("rack", bandwidth=0.0), level(HOST)), "link of topology level rack"),
    ],
)
def test_levels_that_make_no_sense_are_refused(levels: tuple[Level, ...], problem: str) -> None:
    with pytest.raises(InvalidValue, match=problem):
        Topology(levels)


def test_labels_for_an_unknown_level_are_refused() -> None:
    with pytest.raises(InvalidValue, match="'shelf' is unknown - use zone"):
        topology({"shelf": ("x",)})
    with pytest.raises(InvalidValue, match="'shelf' is unknown"):
        topology(PRESETS["eks"]).index("shelf")


def test_a_level_that_the_cluster_lacks_stands_for_the_next_narrower_one() -> None:
    made = topology({"block": ("b",)})
    assert [made.levels[made.index(name)].name for name in NAMES] == ["block"] * 3 + [HOST] * 3


def test_the_first_label_that_a_node_has_counts() -> None:
    found, complaints = paths(
        topology({"rack": ("new", "old")}), {"a": {"new": "r1", "old": "x"}, "b": {"old": "r1", "new": ""}}
    )
    assert found == {"a": (CLUSTER, "r1", "a"), "b": (CLUSTER, "r1", "b")}
    assert not complaints


def test_a_missing_label_leaves_the_node_out_of_that_level_only() -> None:
    found, complaints = paths(
        topology(PRESETS["topograph"]),
        {"a": {SPINE: "b1", LEAF: "r1", CLIQUE: "c1"}, "b": {SPINE: "b1", CLIQUE: "c1"}},
    )
    assert found["b"] == (CLUSTER, None, None, "b1", None, "c1", "b")
    assert [(item.node, item.level, item.problem) for item in complaints] == [
        ("b", "rack", "has no label fabric.topograph.run/tier-0 or network.topology.nvidia.com/leaf")
    ]


@pytest.mark.parametrize(
    ("outer", "inner", "words"),
    [
        ((SPINE, "b"), (LEAF, "r"), "is in rack r1, which most nodes put into block b1, and in block b2"),
        ((LEAF, "r"), (CLIQUE, "c"), "is in nvlink c1, which most nodes put into rack r1, and in rack r2"),
    ],
)
def test_a_domain_in_two_places_is_believed_where_most_nodes_put_it(
    outer: tuple[str, str], inner: tuple[str, str], words: str
) -> None:
    key, name = outer
    labels = {node: {key: f"{name}{1 + (node == 'c')}", inner[0]: f"{inner[1]}1"} for node in "abc"}
    made = topology(PRESETS["topograph"])
    found, complaints = paths(made, labels)
    assert [(item.node, item.problem) for item in complaints] == [("c", words)]
    at = made.index("rack" if inner[0] == LEAF else "nvlink")
    assert found["a"][at] == f"{inner[1]}1"
    assert found["c"][at] is None
    assert found["c"][at - 1] == f"{name}2"


def test_presets_by_name() -> None:
    everything = preset("auto")
    assert [level.name for level in everything.levels] == [CLUSTER, *NAMES]
    assert LEAF in everything.levels[everything.index("rack")].labels
    assert preset("gke") == topology(PRESETS["gke"])
    with pytest.raises(InvalidValue, match="no topology 'moon' - use auto, eks"):
        preset("moon")


def test_a_flag_names_a_preset_or_labels_of_ones_own() -> None:
    assert parse("gke") == preset("gke")
    assert parse("rack=example.com/rack | old/rack,block=example.com/block") == topology(
        {"block": ("example.com/block",), "rack": ("example.com/rack", "old/rack")}
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("moon", "there is no topology 'moon'"),
        ("shelf=x", "level 'shelf' is unknown - use zone"),
        ("host=x", "level 'host' is unknown"),
        ("rack=", "level 'rack' has no usable label ''"),
        ("rack=a|", "level 'rack' has no usable label ''"),
        ("rack=a b", "no usable label 'a b' - write LEVEL=LABEL"),
        ("rack=a,rack=b", "level 'rack' is named twice - put its labels together"),
        ("rack=a,", "level '' has no usable label"),
    ],
)
def test_a_flag_that_makes_no_sense_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidValue, match=problem):
        parse(text)
