"""Objects are trimmed to what planning needs, and half-made ones are read too."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.core import protocol
from twinpool.operator.logic.observed import (
    Child,
    ContainerView,
    PodView,
    Termination,
    pool_key,
    read_child,
    read_pod,
    seconds,
    timestamp,
)

OWNER = {"apiVersion": protocol.API_VERSION, "kind": protocol.KIND, "name": "owner", "uid": "u"}
STRANGER = {"apiVersion": "inference.networking.k8s.io/v1", "kind": protocol.KIND, "name": "other", "uid": "v"}


def test_times_survive_a_round_trip() -> None:
    assert seconds(timestamp(1_700_000_000.9)) == 1_700_000_000.0
    assert seconds(None) is None


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ({}, None),
        ({"namespace": "n", "labels": {protocol.LABEL_POOL: "p"}}, ("n", "p")),
        ({"namespace": "n", "labels": {protocol.LABEL_POOL: "p"}, "ownerReferences": [OWNER]}, ("n", "owner")),
        ({"namespace": "n", "ownerReferences": [OWNER]}, ("n", "owner")),
        ({"namespace": "n", "ownerReferences": [STRANGER]}, None),
        ({"namespace": "n", "ownerReferences": [{**OWNER, "kind": "ReplicaSet"}]}, None),
    ],
)
def test_the_pool_of_an_object(metadata: dict[str, Any], key: tuple[str, str] | None) -> None:
    assert pool_key({"metadata": metadata}) == key


def test_a_fresh_pod() -> None:
    assert read_pod({"metadata": {"name": "p"}}) == PodView("p", "")


def test_a_pod_with_everything() -> None:
    ended = {"reason": "Error", "exitCode": 3, "message": "no model"}
    pod = read_pod(
        {
            "metadata": {
                "name": "p",
                "deletionTimestamp": "2026-01-01T00:00:00Z",
                "labels": {
                    protocol.LABEL_ROLE: "decode",
                    protocol.LABEL_GROUP: "g",
                    protocol.LABEL_REVISION: "r",
                },
            },
            "status": {
                "phase": "Running",
                "conditions": [
                    {"type": "Ready", "status": "True"},
                    {"type": "PodScheduled", "status": "False", "message": "no node"},
                ],
                "initContainerStatuses": [{"name": "i", "state": {"terminated": {"exitCode": 0}}}],
                "containerStatuses": [
                    {
                        "name": "engine",
                        "image": "x",
                        "ready": True,
                        "restartCount": 2,
                        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                        "lastState": {"terminated": ended},
                    }
                ],
            },
        }
    )
    assert pod == PodView(
        name="p",
        role="decode",
        group="g",
        revision="r",
        phase="Running",
        ready=True,
        deadline=seconds("2026-01-01T00:00:00Z"),
        scheduled=False,
        scheduler_message="no node",
        containers=(
            ContainerView("i", "", terminated=Termination("", 0, "")),
            ContainerView(
                "engine", "x", True, 2, "CrashLoopBackOff", "back-off", None, Termination("Error", 3, "no model")
            ),
        ),
    )


def test_a_child_is_kept_without_status_and_server_side_metadata() -> None:
    child = read_child(
        "StatefulSet",
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {
                "name": "s",
                "uid": "u",
                "resourceVersion": "7",
                "generation": 2,
                "labels": {"a": "1"},
                "annotations": {"b": "2"},
                "managedFields": [{}],
            },
            "spec": {"replicas": 1},
            "status": {"replicas": 1, "observedGeneration": 1},
        },
    )
    content = {
        "spec": {"replicas": 1},
        "metadata": {"labels": {"a": "1"}, "annotations": {"b": "2"}, "ownerReferences": []},
    }
    assert child == Child("StatefulSet", "s", "u", "7", content, pods=1, seen=False)
    assert (child.label("a"), child.label("x"), child.annotation("b"), child.annotation("x")) == ("1", "", "2", None)
