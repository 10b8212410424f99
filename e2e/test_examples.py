"""Every example is accepted by a real API server; five shapes of pool become ready with simulated engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.client import get, post
from twinpool.demo.scenario import condition, pods, pool, router_url
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

FOLDER = Path(__file__).parents[1] / "examples"
ROUTES = "gateway.networking.k8s.io"
#: Enough of the Gateway API's definition to store a route: its own rules are its maintainers' to test.
ROUTE_CRD: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": f"httproutes.{ROUTES}",
        "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in for tests"},
    },
    "spec": {
        "group": ROUTES,
        "scope": "Namespaced",
        "names": {"kind": "HTTPRoute", "plural": "httproutes"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {"spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                    }
                },
            }
        ],
    },
}


@pytest.fixture
def routes(twinpool: Cluster) -> Iterator[Cluster]:
    """A cluster that knows HTTPRoutes; a stand-in where it did not."""
    known = f"httproutes.{ROUTES}" in twinpool.kubectl("get", "crd", "-o", "name").stdout
    if not known:
        twinpool.kubectl("create", "-f", "-", input=yaml.safe_dump(ROUTE_CRD))
        twinpool.kubectl("wait", "--for=condition=Established", f"crd/httproutes.{ROUTES}", "--timeout=60s", timeout=90)
    yield twinpool
    if not known:
        twinpool.kubectl("delete", "crd", f"httproutes.{ROUTES}", "--wait=false")


#: Each is another shape of pool.
SHAPES = ("smallest", "aggregated", "multi-node", "speculation", "lora")


def test_all_are_accepted(routes: Cluster, namespace: str) -> None:
    def accepted() -> bool:
        # Discovery learns of a new definition some time after it is established.
        arguments = ("apply", "--dry-run=server", "--validate=strict", "-f", str(FOLDER))
        said = routes.kubectl("-n", namespace, *arguments, check=False)
        assert "is invalid" not in said.stderr
        assert "unknown field" not in said.stderr
        return said.returncode == 0

    wait_until(accepted, 60, "every example is accepted")


def simulated(path: Path) -> dict[str, Any]:
    """Return the pool of an example with simulated engines, which need neither GPUs nor weights."""
    (found,) = [body for body in yaml.safe_load_all(path.read_text()) if body["kind"] == protocol.KIND]
    found["spec"]["engine"] = {"kind": "simulated"}
    # The local nodes are no racks, their memory is this machine's, and nobody has made the Secret of the hub.
    found["spec"].pop("placement", None)
    found["spec"]["model"].pop("secretRef", None)
    for role in protocol.ROLES:
        resources = found["spec"].get(role, {}).get("resources", {})
        for name in ("cpu", "memory", "shm"):
            resources.pop(name, None)
    return {**found}


def test_shapes_become_ready_and_answer(twinpool: Cluster, namespace: str) -> None:
    bodies = [simulated(FOLDER / f"{name}.yaml") for name in SHAPES]
    wide = bodies[2]["spec"]["decode"]
    # Two pods on two nodes as in the example, but with room for the other pools beside them.
    wide["parallelism"]["tensor"] = 2
    wide["resources"]["gpu"] = {"perNode": 2}
    twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=yaml.safe_dump_all(bodies))
    for body in bodies:
        name, model = body["metadata"]["name"], body["spec"]["model"]["name"]
        wait_until(
            lambda n=name: condition(pool(twinpool, namespace, n), "Ready").get("status") == "True",
            240,
            f"{name} is ready",
        )
        url = f"{router_url(twinpool, namespace, name)}/v1/completions"
        assert post(url, {"model": model, "prompt": "a b", "max_tokens": 2}).status == 200
    (base,) = (body["spec"]["model"] for body in bodies if "adapters" in body["spec"]["model"])
    url = router_url(twinpool, namespace, "sql")
    known = {entry["id"]: entry.get("parent") for entry in json.loads(get(f"{url}/v1/models"))["data"]}
    assert known == {base["name"]: None, **{adapter["name"]: base["name"] for adapter in base["adapters"]}}
    for adapter in base["adapters"]:
        reply = post(f"{url}/v1/completions", {"model": adapter["name"], "prompt": "a b", "max_tokens": 2})
        assert (reply.status, reply.json()["model"]) == (200, adapter["name"])
    nodes = [pod["spec"]["nodeName"] for pod in pods(twinpool, namespace, "wide", "decode")]
    assert len(nodes) == 2, "one replica over two pods"
