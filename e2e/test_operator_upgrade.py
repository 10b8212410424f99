"""CRD and operator go forward from the version before and back to its CRD, and no worker is restarted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.client import post
from twinpool.demo.scenario import condition, pool, router_url
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[1]
STORED = ROOT / "tests" / "operator" / "fixtures" / "v0.1.0"
NAMESPACE, NAME = "stored", "simulated"
OPERATOR = ("-n", "twinpool-system")


@pytest.fixture
def old(twinpool: Cluster) -> Iterator[Cluster]:
    """The cluster with the CRD of the version before and no operator; afterwards with ours again."""
    twinpool.kubectl(*OPERATOR, "scale", "deployment/twinpool-operator", "--replicas=0")
    twinpool.kubectl(*OPERATOR, "wait", "--for=delete", "pod", "--all", "--timeout=60s")
    apply_crd(twinpool, STORED / "crd.yaml")
    twinpool.kubectl("create", "namespace", NAMESPACE)
    yield twinpool
    twinpool.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    new(twinpool)


def apply_crd(cluster: Cluster, path: Path) -> None:
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))


def new(cluster: Cluster) -> None:
    """Install our CRD, then our operator: the order that the upgrade notes give."""
    apply_crd(cluster, ROOT / "crds")
    cluster.kubectl(*OPERATOR, "scale", "deployment/twinpool-operator", "--replicas=1")
    cluster.kubectl(*OPERATOR, "rollout", "status", "deployment/twinpool-operator", "--timeout=120s", timeout=150)


def store(cluster: Cluster) -> None:
    """Make the objects that the version before left, as they were."""
    stored, *children = yaml.safe_load_all((STORED / "objects.yaml").read_text())
    status = stored.pop("status")
    cluster.kubectl("create", "-f", "-", input=yaml.safe_dump(stored))
    uid = pool(cluster, NAMESPACE, NAME)["metadata"]["uid"]
    path = f"{protocol.PLURAL}.{protocol.GROUP}/{NAME}"
    cluster.kubectl(
        *("-n", NAMESPACE, "patch", path, "--subresource=status", "--type=merge"), "-p", json.dumps({"status": status})
    )
    for child in children:
        for owner in child["metadata"].get("ownerReferences", ()):
            owner["uid"] = uid
    cluster.kubectl("create", "-f", "-", input=yaml.safe_dump_all(children))


def workers(cluster: Cluster) -> dict[str, tuple[str, int, bool]]:
    """Return uid, restarts and readiness of every worker pod."""
    items: list[dict[str, Any]] = cluster.json("-n", NAMESPACE, "get", "pods", "-l", protocol.LABEL_GROUP)["items"]
    return {
        item["metadata"]["name"]: (
            item["metadata"]["uid"],
            sum(status["restartCount"] for status in item["status"].get("containerStatuses", ())),
            all(status["ready"] for status in item["status"].get("containerStatuses", [{"ready": False}])),
        )
        for item in items
    }


def serves(cluster: Cluster) -> bool:
    url = f"{router_url(cluster, NAMESPACE, NAME)}/v1/completions"
    return post(url, {"model": "simulated-model", "prompt": "a b", "max_tokens": 2}).status == 200


def settled(cluster: Cluster) -> bool:
    found = pool(cluster, NAMESPACE, NAME)
    return (condition(found, "Ready").get("status"), condition(found, "Progressing").get("reason")) == (
        "True",
        "Complete",
    )


def test_forward_and_back_without_a_restart(old: Cluster) -> None:
    store(old)
    wait_until(lambda: len(workers(old)) == 2 and all(ready for *_, ready in workers(old).values()), 120, "they run")
    before, revision = workers(old), pool(old, NAMESPACE, NAME)["status"]["revision"]
    new(old)
    wait_until(
        lambda: "targetRatio" in pool(old, NAMESPACE, NAME)["status"] and settled(old), 120, "ours has taken over"
    )
    assert workers(old) == before
    assert pool(old, NAMESPACE, NAME)["status"]["revision"] == revision
    assert serves(old)
    old.kubectl(*OPERATOR, "scale", "deployment/twinpool-operator", "--replicas=0")
    old.kubectl(*OPERATOR, "wait", "--for=delete", "pod", "--all", "--timeout=60s")
    apply_crd(old, STORED / "crd.yaml")
    went_back = pool(old, NAMESPACE, NAME)
    assert "rollout" not in went_back["spec"], "fields that the version before does not know are gone"
    assert went_back["spec"]["decode"]["replicas"] == 1
    assert workers(old) == before
    assert serves(old)
    # What the version before would write back is taken by its schema.
    old.kubectl("-n", NAMESPACE, "annotate", f"{protocol.PLURAL}.{protocol.GROUP}/{NAME}", "example.com/touched=1")
    new(old)
    wait_until(lambda: settled(old) and serves(old), 120, "forward again")
    assert workers(old) == before
