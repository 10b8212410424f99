"""What preflights say of the network, from the note of a group to what placement counts with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from twinpool.core.links import Measured
from twinpool.core.status import LinkStatus
from twinpool.core.topology import PRESETS, topology
from twinpool.operator.logic import names
from twinpool.operator.logic.groups import Group
from twinpool.operator.logic.interconnect import Note
from twinpool.operator.logic.measured_links import REMEMBERED, known, remembered
from twinpool.operator.logic.observed import Child, PodView

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]

NOW = 1_000_000.0
TOPOLOGY = topology(PRESETS["topograph"])
PASSED = Note("u0/0", NOW, "passed", nodes=("a", "b"))
LEADER = PodView("g-0", "decode", "g", uid="u0")


def noted(*levels: Measured, at: float = NOW) -> Group:
    note = dataclasses.replace(PASSED, levels=levels, at=at)
    content = {"metadata": {"annotations": {names.INTERCONNECT_ANNOTATION: note.to_json()}, "labels": {}}}
    return Group(Child("StatefulSet", "g", "ug", "7", content), "decode", "r", 1, (LEADER,))


def with_status(make_pool: Make, entries: list[dict[str, Any]]) -> InferencePool:
    pool = make_pool()
    links = tuple(LinkStatus.model_validate(entry) for entry in entries)
    return pool.model_copy(update={"status": pool.status.model_copy(update={"links": links})})


def test_levels_are_told_from_broad_to_narrow_beside_what_was_configured(make_pool: Make) -> None:
    host, rack = Measured("host", 4, 300e9, 2e-6), Measured("rack", 2, 20e9, 5e-6)
    more = Measured("rack", 3, 25e9, 4e-6)
    found = remembered(make_pool(), [noted(host, rack), noted(more, at=NOW + 9)], TOPOLOGY, NOW + 9)
    assert [(item["level"], item["pairs"], item["bandwidth"], item["configured"]) for item in found] == [
        ("rack", 5, 25_000_000_000, 50_000_000_000),
        ("host", 4, 300_000_000_000, 450_000_000_000),
    ]
    assert found[0]["since"] > found[1]["since"], "each says when it was measured last"
    (first, second) = known([with_status(make_pool, found), make_pool()])
    assert first == Measured("rack", 5, 25e9, 4e-6)
    assert second == host


def test_a_level_outlives_its_groups_for_a_day(make_pool: Make) -> None:
    found = remembered(make_pool(), [noted(Measured("rack", 3, 20e9, 5e-6))], TOPOLOGY, NOW)
    pool = with_status(make_pool, found)
    assert remembered(pool, [], TOPOLOGY, NOW + REMEMBERED - 1) == found
    assert remembered(pool, [], TOPOLOGY, NOW + REMEMBERED) == []
    newer = noted(Measured("rack", 3, 10e9, 5e-6), at=NOW + 5)
    assert remembered(pool, [newer], TOPOLOGY, NOW + 6)[0]["bandwidth"] == 10_000_000_000


def test_levels_that_the_topology_lacks_are_left_out(make_pool: Make) -> None:
    assert remembered(make_pool(), [noted(Measured("moon", 3, 1e9, 1e-6))], TOPOLOGY, NOW) == []
    odd = remembered(make_pool(), [noted(Measured("rack", 3, 1e9, 1e-6))], TOPOLOGY, NOW)
    pool = with_status(make_pool, [{**odd[0], "level": "moon"}])
    assert remembered(pool, [], TOPOLOGY, NOW) == []


def test_the_status_of_a_pool_says_what_its_groups_measured(model_cluster: Any, make_pool: Make) -> None:
    cluster = model_cluster(make_pool())
    cluster.reconcile()
    cluster.run_controllers()
    (name,) = [name for name in cluster.sets() if "decode" in name]
    note = dataclasses.replace(
        PASSED, leader=f"{cluster.pods[f'{name}-0'].uid}/0", levels=(Measured("host", 3, 200e9, 1e-6),)
    )
    annotations = cluster.objects["StatefulSet", name]["metadata"]["annotations"]
    annotations[names.INTERCONNECT_ANNOTATION] = note.to_json()
    cluster.reconcile()
    (link,) = cluster.pool.status.links
    assert (link.level, link.pairs, link.bandwidth, link.configured) == ("host", 3, 200_000_000_000, 450_000_000_000)
