"""ComputeDomains: which groups get one, what their pods claim, and when it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.compute_domain import KIND
from twinpool.operator.logic.observed import Observed
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

SERVED = Settings(sees_nodes=True, compute_domains="Served")
#: The same without a view of the nodes, where nothing is gated.
DRIVER = Settings(compute_domains="Served")
NOW = 1000.0
#: A replica over two nodes of eight GPUs.
WIDE: dict[str, Any] = {"parallelism": {"tensor": 16}}
OWN = {"podTemplate": {"spec": {"resourceClaims": [{"name": "x", "resourceClaimTemplateName": "mine"}]}}}
AMD = {"resources": {"gpu": {"resource": "amd.com/gpu"}}}


@pytest.mark.parametrize(
    ("decode", "placement", "settings", "state"),
    [
        (WIDE, {}, SERVED, "PerGroup"),
        (WIDE, {"mode": "affinity"}, SERVED, "PerGroup"),
        (WIDE, {}, Settings(sees_nodes=True), "NotServed"),
        (WIDE, {}, Settings(compute_domains="NotAllowed"), "NotAllowed"),
        (WIDE, {"computeDomain": "never"}, SERVED, "Never"),
        ({**WIDE, **OWN}, {}, SERVED, "OwnClaims"),
        ({**WIDE, **AMD}, {}, SERVED, None),
        ({}, {}, SERVED, None),
        (WIDE, None, SERVED, None),
    ],
)
def test_which_groups_get_a_domain(
    model_cluster: Any,
    make_pool: Callable[..., InferencePool],
    decode: dict[str, Any],
    placement: dict[str, Any] | None,
    settings: Settings,
    state: str | None,
) -> None:
    cluster = model_cluster(make_pool({"decode": {**decode, "replicas": 2}}, placement=placement))
    cluster.reconcile(settings)
    assert cluster.pool.status.compute_domain == state
    there = sorted(name for kind, name in cluster.objects if kind == KIND)
    wide = sorted(name for name, child in cluster.sets().items() if child.content["spec"]["replicas"] == 2)
    assert there == (wide if state == "PerGroup" else [])
    for name, child in cluster.sets().items():
        spec = child.content["spec"]["template"]["spec"]
        claims = [claim.get("resourceClaimTemplateName") for claim in spec.get("resourceClaims", [])]
        assert (name in claims) == (name in there)


def test_pods_claim_a_channel_beside_their_gpus(model_cluster: Any, make_pool: Callable[..., InferencePool]) -> None:
    cluster = model_cluster(make_pool({"decode": WIDE}, placement={}))
    cluster.reconcile(SERVED)
    ((_, name),) = [key for key in cluster.objects if key[0] == KIND]
    domain = cluster.objects[KIND, name]
    assert domain["apiVersion"] == "resource.nvidia.com/v1beta1"
    assert domain["spec"] == {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": name}}}
    assert domain["metadata"]["ownerReferences"] == [names.owner_reference(cluster.pool)], "it goes with the pool"
    spec = cluster.sets()[name].content["spec"]["template"]["spec"]
    assert spec["resourceClaims"] == [{"name": "compute-domain", "resourceClaimTemplateName": name}]
    (engine,) = [each for each in spec["containers"] if each["name"] == protocol.ENGINE_CONTAINER]
    assert engine["resources"]["claims"] == [{"name": "compute-domain"}]
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert spec["schedulingGates"], "nodes are chosen for it as for any other group"
    kinds = [action.kind for action in plan(Observed(cluster.pool), SERVED, NOW).actions]
    assert kinds.index(KIND) < kinds.index("StatefulSet"), "what pods claim is there before they are"


def test_a_domain_lives_as_long_as_its_group(model_cluster: Any, make_pool: Callable[..., InferencePool]) -> None:
    cluster = model_cluster(make_pool({"decode": {**WIDE, "replicas": 2}}, placement={}))
    cluster.settle(DRIVER)
    assert len([key for key in cluster.objects if key[0] == KIND]) == 2
    lost = next(key for key in cluster.objects if key[0] == KIND)
    del cluster.objects[lost]
    cluster.reconcile(SERVED)
    assert lost in cluster.objects, "one that somebody deleted is made again"
    cluster.pool = make_pool({"decode": {**WIDE, "replicas": 1}}, placement={})
    cluster.settle(DRIVER)
    left = [name for kind, name in cluster.objects if kind == KIND]
    assert left == [name for name, child in cluster.sets().items() if child.content["spec"]["replicas"] == 2]
    assert len(left) == 1


def test_neither_a_driver_nor_an_edit_starts_a_rollout(
    model_cluster: Any, make_pool: Callable[..., InferencePool]
) -> None:
    """What a group was made with stays: where its pods go, and how, is not what they are made of."""
    cluster = model_cluster(make_pool({"decode": WIDE}, placement={}))
    cluster.settle()
    before = {name: child.content for name, child in cluster.sets().items()}
    cluster.settle(DRIVER)
    assert {name: child.content for name, child in cluster.sets().items()} == before
    assert cluster.pool.status.compute_domain == "PerGroup", "but groups that come get one"
    made = model_cluster(make_pool({"decode": WIDE}, placement={}))
    made.settle(DRIVER)
    before = {name: child.content for name, child in made.sets().items()}
    made.pool = make_pool({"decode": WIDE}, placement={"computeDomain": "never"})
    made.settle(DRIVER)
    assert {name: child.content for name, child in made.sets().items()} == before
    assert len([key for key in made.objects if key[0] == "ControllerRevision"]) == 1
    made.settle()
    assert {name: child.content for name, child in made.sets().items()} == before, "the driver is gone: nothing is said"
