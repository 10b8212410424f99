"""Kubernetes objects as placement sees them: quantities, what pods ask for and hold, what nodes give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core.protocol import WORKER_CONFIG_ENV, WorkerConfig
from twinpool.operator.logic.placement.model import Constraints, Holder, Match, Node, Taint, Tolerates
from twinpool.operator.logic.placement.quantity import amount
from twinpool.operator.logic.placement.reading import Held, accelerator, asked, constraints, gang, held, node

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool


@pytest.mark.parametrize(
    ("resource", "quantity", "expected"),
    [
        ("cpu", "2", 2000),
        ("cpu", "250m", 250),
        ("cpu", "0.1", 100),
        ("cpu", 4, 4000),
        ("memory", "1Gi", 2**30),
        ("memory", "1.5G", 1_500_000_000),
        ("memory", "128974848", 128974848),
        ("memory", "1e3", 1000),
        ("memory", "1E", 10**18),
        ("memory", "1m", 1),
        ("nvidia.com/gpu", "8", 8),
        ("pods", "110", 110),
        ("memory", "a lot", 0),
        ("memory", "1mm", 0),
        ("memory", "1/0", 0),
    ],
)
def test_quantities(resource: str, quantity: object, expected: int) -> None:
    assert amount(resource, quantity) == expected


def container(**requests: str) -> dict[str, Any]:
    return {"resources": {"requests": requests}}


def test_a_pod_asks_for_its_containers_or_for_its_largest_init_container() -> None:
    spec = {
        "initContainers": [
            {**container(cpu="4"), "name": "first"},
            {**container(cpu="1"), "restartPolicy": "Always"},
            {**container(cpu="3", memory="1Gi")},
        ],
        "containers": [container(cpu="1", memory="2Gi"), {"resources": {"limits": {"nvidia.com/gpu": "2"}}}],
        "overhead": {"cpu": "100m"},
    }
    assert asked(spec) == {"cpu": 4100, "memory": 2**31, "nvidia.com/gpu": 2, "pods": 1}
    assert asked({"containers": [container(cpu="1")], "resources": {"requests": {"cpu": "3"}}})["cpu"] == 3000
    assert asked({}) == {"pods": 1}


def template(config: WorkerConfig | None = None, **spec: Any) -> dict[str, Any]:
    env = [{"name": "OTHER"}] + ([{"name": WORKER_CONFIG_ENV, "value": config.to_json()}] if config else [])
    engine = {"env": env, "resources": {"limits": {"nvidia.com/gpu": "8", "rdma/hca": "8"}}}
    return {"spec": {"containers": [engine], **spec}}


def config(**changes: int) -> WorkerConfig:
    return WorkerConfig("p", "ns", "decode", "", "vllm", "m", "m", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "pods", "unit"),
    [
        ({"tensor": 8, "gpus": 8}, 1, 1),
        ({"tensor": 16, "nodes": 2, "gpus": 8}, 2, 2),
        ({"tensor": 8, "pipeline": 4, "nodes": 4, "gpus": 8}, 4, 1),
        ({"tensor": 16, "pipeline": 2, "nodes": 4, "gpus": 8}, 4, 2),
        ({"tensor": 1, "nodes": 4}, 4, 1),
    ],
)
def test_the_units_of_a_group(changes: dict[str, int], pods: int, unit: int) -> None:
    found = gang("ns/g", "ns/p", "decode", template(config(**changes)))
    assert (found.pods, found.unit, found.accelerator, found.gpus) == (pods, unit, "nvidia.com/gpu", 8)


def test_where_a_group_may_go_is_read_from_its_template() -> None:
    terms = [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    tolerations = [{"operator": "Exists"}, {"key": "a", "value": "b", "effect": "NoSchedule"}]
    found = gang("g", "p", "decode", template(affinity=affinity, nodeSelector={"a": "b"}, tolerations=tolerations))
    assert found.terms == ((Match("gpu", "Exists"),),)
    assert found.selector == {"a": "b"}
    assert found.tolerates == (Tolerates(operator="Exists"), Tolerates("a", "Equal", "b", "NoSchedule"))
    assert (found.pods, found.unit) == (1, 1), "a template that is not ours is a pod"


def test_what_stands_for_a_gpu() -> None:
    assert accelerator({"cpu": 1, "rdma/hca": 8, "nvidia.com/gpu": 8}, 8) == "nvidia.com/gpu"
    assert accelerator({"nvidia.com/mig-1g.10gb": 2, "rdma/hca": 1}, 2) == "nvidia.com/mig-1g.10gb"
    assert accelerator({"amd.com/gpu": 8, "rdma/hca": 8}, 8) == "amd.com/gpu"
    assert accelerator({"cpu": 1}, 0) == ""


def test_a_node() -> None:
    body = {
        "metadata": {"name": "n1", "labels": {"a": "b"}},
        "spec": {
            "unschedulable": True,
            "taints": [
                {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
                {"key": "dedicated", "value": "x", "effect": "NoExecute"},
            ],
        },
        "status": {"allocatable": {"cpu": "4"}, "conditions": [{"type": "Ready", "status": "True"}]},
    }
    found = node(body)
    assert found == Node("n1", {"a": "b"}, {"cpu": 4000}, (Taint("dedicated", "x", "NoExecute"),), True, True)
    assert not node({**body, "status": {}}).ready
    assert not node({**body, "metadata": {"name": "n1", "deletionTimestamp": "x"}}).ready
    assert node({}) == Node("", ready=False)


def test_what_pods_hold() -> None:
    only = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}
    sent = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [only]}}}

    def pod(phase: str = "Pending", **spec: Any) -> dict[str, Any]:
        return {"metadata": {"namespace": "ns", "name": "x", "uid": "u"}, "spec": spec, "status": {"phase": phase}}

    holder = Holder("ns/x", {"pods": 1})
    assert held(pod(nodeName="n1")) == Held("n1", "u", holder)
    assert held(pod(affinity=sent)) == Held("n2", "u", holder), "it was sent there and will come"
    assert held(pod(affinity=sent, schedulingGates=[{"name": "x"}])) is None
    assert held(pod("Succeeded", nodeName="n1")) is None
    assert held({}) is None


def test_what_a_pool_wants(make_pool: Callable[..., InferencePool]) -> None:
    assert constraints(make_pool()) == Constraints()
    assert constraints(make_pool(placement={})) == Constraints()
    wants = {
        "tensor": {"required": False},
        "expert": {"within": "block", "required": True},
        "pair": {"within": "rack"},
        "spread": {"across": "zone"},
    }
    assert constraints(make_pool(placement=wants)) == Constraints("nvlink", False, "block", True, "rack", "zone")
