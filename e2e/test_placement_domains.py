"""NVIDIA's ComputeDomains on a real API server: their shape alone, for there is neither their driver nor such a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.near import NAME, WIDE, Pool
from twinpool.demo.scenario import OPERATOR_NAMESPACE, pool
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import LocalCluster

pytestmark = pytest.mark.cluster

#: Fields, defaults and rules of ``spec`` as the driver's chart has them.
_CHANNEL: dict[str, Any] = {
    "type": "object",
    "required": ["resourceClaimTemplate"],
    "properties": {
        "allocationMode": {"type": "string", "default": "Single", "enum": ["All", "Single"]},
        "resourceClaimTemplate": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}},
        },
    },
}
_SPEC = {
    "type": "object",
    "required": ["channel", "numNodes"],
    "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "A computeDomain.spec is immutable"}],
    "properties": {"channel": _CHANNEL, "numNodes": {"type": "integer"}},
}
CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "computedomains.resource.nvidia.com"},
    "spec": {
        "group": "resource.nvidia.com",
        "names": {"kind": "ComputeDomain", "plural": "computedomains", "singular": "computedomain"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": _SPEC}}},
            }
        ],
    },
}


@pytest.fixture
def served(labelled: LocalCluster) -> Iterator[None]:
    """Have the cluster serve ComputeDomains, and the operator know it."""
    labelled.kubectl("apply", "-f", "-", input=yaml.safe_dump(CRD))
    labelled.kubectl("wait", "--for=condition=Established", f"crd/{CRD['metadata']['name']}", "--timeout=30s")
    restart(labelled)
    yield
    labelled.kubectl("delete", "crd", CRD["metadata"]["name"])
    restart(labelled)


def restart(cluster: LocalCluster) -> None:
    operator = ("-n", OPERATOR_NAMESPACE, "deployment/twinpool-operator")
    cluster.kubectl("rollout", "restart", *operator)
    cluster.kubectl("rollout", "status", *operator, "--timeout=90s", timeout=100)


def domains(near: Pool) -> dict[str, dict[str, Any]]:
    items = near.cluster.json("-n", near.namespace, "get", "computedomains.resource.nvidia.com")["items"]
    return {item["metadata"]["name"]: item for item in items}


def said(near: Pool) -> str | None:
    found: str | None = pool(near.cluster, near.namespace, NAME).get("status", {}).get("computeDomain")
    return found


def group_of(near: Pool) -> str:
    name: str = near.workers()[0]["metadata"]["labels"][protocol.LABEL_GROUP]
    return name


def test_without_the_driver_none_is_made_and_the_status_says_so(near: Pool) -> None:
    near.apply()
    wait_until(near.ready, 120, "the pool serves")
    assert said(near) == "NotServed"
    assert not any(pod["spec"].get("resourceClaims") for pod in near.workers())


@pytest.mark.usefixtures("served")
def test_each_group_that_spans_nodes_has_one_for_as_long_as_it_lives(near: Pool) -> None:
    near.apply()
    wait_until(lambda: len(near.workers()) == 2, 60, "there are pods")
    group = group_of(near)
    assert said(near) == "PerGroup"
    (domain,) = domains(near).values()
    assert domain["metadata"]["name"] == group
    channel = {"allocationMode": "Single", "resourceClaimTemplate": {"name": group}}
    assert domain["spec"] == {"numNodes": 0, "channel": channel}
    assert domain["metadata"]["ownerReferences"][0]["kind"] == protocol.KIND
    for pod in near.workers():
        assert pod["spec"]["resourceClaims"] == [{"name": "compute-domain", "resourceClaimTemplateName": group}]
        assert pod["spec"]["containers"][0]["resources"]["claims"] == [{"name": "compute-domain"}]

    uid = domain["metadata"]["uid"]
    near.kubectl("delete", "computedomains.resource.nvidia.com", group)
    again = wait_until(lambda: domains(near).get(group), 30, "it is made again")
    assert again["metadata"]["uid"] != uid

    near.kubectl("delete", "statefulset", group)
    wait_until(lambda: group not in domains(near), 60, "it goes with its group")
    wait_until(lambda: len(domains(near)) == 1, 60, "the group that comes has its own")

    near.apply({"placement": {"computeDomain": "never"}})
    wait_until(lambda: said(near) == "Never", 30, "the status says what new groups get")
    assert len(domains(near)) == 1, "an edit leaves groups as they are"
    near.kubectl("delete", "tpool", NAME)
    wait_until(lambda: not domains(near), 60, "it goes with the pool")


@pytest.mark.usefixtures("served")
def test_groups_of_one_node_have_none(near: Pool) -> None:
    near.apply({"decode": {**WIDE, "parallelism": {"tensor": 2}}})
    wait_until(near.ready, 120, "the pool serves")
    assert said(near) is None
    assert not domains(near)
