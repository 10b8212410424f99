"""How far the weights of starting groups are, as launchers say it, in the pool's status and in words."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.localengine.pod import worker_config
from twinpool.operator.logic import loading
from twinpool.operator.logic.groups import Group
from twinpool.operator.logic.loading import Weights, read_weights
from twinpool.operator.logic.observed import Child, Observed, PodView

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.protocol import WorkerConfig
    from twinpool.core.spec import InferencePool


def pod(name: str, **changes: Any) -> PodView:
    base = {"name": name, "uid": name, "role": "decode", "phase": "Running", "address": "10.0.0.1"}
    return PodView(**{**base, **changes})


def group(name: str, *pods: PodView, config: WorkerConfig | None = None, **changes: Any) -> Group:
    told = (config or worker_config()).to_json()
    container = {"name": "engine", "env": [{"name": "TWINPOOL_WORKER", "value": told}]}
    content = {"metadata": {"annotations": {}}, "spec": {"template": {"spec": {"containers": [container]}}}}
    child = Child(kind="StatefulSet", name=name, uid=name, resource_version="1", content=content, **changes)
    return Group(child, "decode", "r", 1, pods)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"weights": {"stage": "downloading", "bytes": 1, "total": 4}}, Weights("downloading", 1, 4)),
        ({"weights": {"stage": "waiting", "bytes": -1, "total": "many"}}, Weights("waiting")),
        ({"weights": []}, None),
        ({}, None),
        ([], None),
    ],
)
def test_what_a_launcher_says_is_read(document: Any, expected: Weights | None) -> None:
    assert read_weights(document) == expected


def test_small_steps_are_no_news() -> None:
    assert Weights("downloading", 50, 1000).step == Weights("downloading", 99, 1000).step
    assert Weights("downloading", 50, 1000).step != Weights("downloading", 100, 1000).step
    assert Weights("waiting").step != Weights("downloading").step


def test_only_starting_pods_that_have_weights_fetched_are_asked() -> None:
    starting = pod("a")
    served = pod("b", has_served=True)
    others = [pod("c", containers_ready=True), pod("d", address=""), pod("e", phase="Pending"), pod("f", deadline=1.0)]
    assert loading.to_ask([group("g", starting, served, *others)]) == [starting]
    for config, asked in (
        (worker_config(model_path="/m"), False),
        (worker_config(model_path="/m", model_checksum="sha256:0"), True),
        (worker_config(model_path="/m", draft_model="org/d"), True),
        (worker_config(engine="simulated"), False),
    ):
        assert bool(loading.to_ask([group("g", starting, config=config)])) == asked
    assert not loading.to_ask([group("g", starting, deleting=True)])
    bare = group("g", starting)
    assert not loading.to_ask(
        [dataclasses.replace(bare, child=dataclasses.replace(bare.child, content={"metadata": {"annotations": {}}}))]
    )


def test_the_slowest_groups_come_first(make_pool: Callable[..., InferencePool]) -> None:
    gigabyte = 10**9
    told = {
        "a-0": Weights("downloading", 3 * gigabyte, 4 * gigabyte),
        "a-1": Weights("checking", gigabyte, 4 * gigabyte),
        "b-0": Weights("waiting", 0, 4 * gigabyte),
        "c-0": Weights("done", 4 * gigabyte, 4 * gigabyte),
        "d-0": Weights("waiting"),
    }
    observed = Observed(make_pool(), weights=told)
    groups = [group(name, *(pod(f"{name}-{rank}") for rank in range(2))) for name in "abcde"]
    found = loading.loading(observed, groups)
    assert found == [
        {"group": "b", "stage": "waiting", "bytes": 0, "total": 4 * gigabyte},
        {"group": "a", "stage": "checking", "bytes": gigabyte, "total": 4 * gigabyte},
        {"group": "d", "stage": "waiting", "bytes": 0, "total": 0},
    ]
    assert loading.words(found) == "group b waits for weights: 0.0 of 4.0 GB (and 2 more)"
    assert loading.words(found[2:]) == "group d waits for weights"
    assert loading.words([]) == ""
    assert not loading.loading(observed, [group("a", pod("a-0"), deleting=True)])
