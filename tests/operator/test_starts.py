"""How long groups take to start, and which are late."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.operator.logic import starts
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.observed import PodView

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool


def test_how_long_groups_took_to_start() -> None:
    pods = [
        PodView(f"p{n}", "decode", gated=True, created=100.0, ready_since=100.0 + took)
        for n, took in enumerate((10.0, 30.0, 20.0))
    ]
    assert starts.times(pods) == [10.0, 20.0, 30.0]
    assert starts.usual([10.0, 20.0, 30.0]) == 20.0
    others = [PodView("r", "router", created=1.0, ready_since=9.0), dataclasses.replace(pods[0], created=None)]
    assert starts.times(others) == []
    assert starts.usual([]) == 0.0


@pytest.mark.parametrize(
    ("took", "limit"), [([], math.inf), ([10.0, 40.0], 80.0), ([float(n) for n in range(1, 41)], 38.0)]
)
def test_after_how_long_a_start_is_late(took: list[float], limit: float) -> None:
    assert starts.patience(took) == limit


def test_late_is_what_has_its_nodes_and_never_served(
    make_pool: Callable[..., InferencePool], model_cluster: Any
) -> None:
    cluster = model_cluster(make_pool({"prefill": {"replicas": 2}, "decode": {"replicas": 2}}))
    cluster.settle()
    cluster.pods = {
        name: dataclasses.replace(pod, node="n1" if pod.group else "", created=cluster.now - 100.0)
        for name, pod in cluster.pods.items()
    }

    def late(limit: float = 60.0, **changes: Any) -> tuple[int, int]:
        found = cluster.observed()
        pods = tuple(
            dataclasses.replace(pod, **{"ready": False, "containers_ready": False, **changes})
            if pod.role == "decode"
            else pod
            for pod in found.pods
        )
        return starts.late(groups(dataclasses.replace(found, pods=pods)), limit, cluster.now)

    assert starts.serving(groups(cluster.observed())) == (2, 2)
    assert late(has_served=False) == (0, 2)
    assert late(limit=200.0, has_served=False) == (0, 0)
    assert late(node="", has_served=False) == (0, 0), "it waits for a node, and so would another"
    assert late(has_served=True) == (0, 0), "its engine was restarted"
    assert late(has_served=False, deadline=1.0) == (0, 0)
    assert late(has_served=False, created=None) == (0, 0)
    assert late(has_served=False, rank=1) == (0, 0), "nobody leads"
    gone = dataclasses.replace(cluster.observed(), pods=())
    assert starts.late(groups(gone), 0.0, cluster.now) == (0, 0)
