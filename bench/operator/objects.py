"""The objects of a large cluster: pools with everything that the operator made for them, their pods, and strangers.

The pools' children come from the operator's own ``plan``, so that an operator that starts finds what it would have
made itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.spec import InferencePool
from twinpool.operator.logic.actions import Apply
from twinpool.operator.logic.observed import Observed
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings
from twinpool.operator.shell.cluster import list_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.operator.api import Api, Request

NAMESPACE = "bench"
POOLS = list_path(protocol.KIND, NAMESPACE)
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
PREFILL, DECODE = 3, 6
_NOW = "2026-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True)
class Size:
    """How much there is. Each pool has 3 prefill groups, 6 decode groups and a router: 10 pods."""

    pools: int = 500
    strangers: int = 20_000
    nodes: int = 2_000

    @property
    def pods(self) -> int:
        """Return how many pods belong to pools."""
        return self.pools * (PREFILL + DECODE + 1)


def pool(number: int) -> dict[str, Any]:
    """Return a pool's manifest."""
    role = {"resources": {"gpu": {"perNode": 0}}}
    return {
        "apiVersion": protocol.API_VERSION,
        "kind": protocol.KIND,
        "metadata": {"name": f"pool-{number:03}", "namespace": NAMESPACE},
        "spec": {
            "model": {"name": "bench"},
            "engine": {"kind": "simulated"},
            "prefill": {**role, "replicas": PREFILL},
            "decode": {**role, "replicas": DECODE},
        },
    }


async def create(api: Api, size: Size) -> None:
    """Create everything."""
    await api.send("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    await api.send("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": "default"}})
    await api.send_all(("POST", "/api/v1/nodes", _node(number)) for number in range(size.nodes))
    await api.send_all(("POST", POOLS, pool(number)) for number in range(size.pools))
    stored = (await api.send("GET", POOLS))["items"]
    children = [body for item in stored for body in _children(item)]
    # The service accounts come before the pods that use them.
    await api.send_all(("POST", list_path(body["kind"], NAMESPACE), body) for body in children)
    reported = [body for body in children if body["kind"] in ("StatefulSet", "Deployment")]
    await api.send_all(_reports(reported))
    await api.send_all(("POST", PODS, body) for body in _pods(children, size.nodes))
    await api.send_all(
        ("PATCH", f"{PODS}/{body['metadata']['name']}/status", status(body)) for body in _pods(children, 1)
    )
    await api.send_all(("POST", PODS, _stranger(number, size.nodes)) for number in range(size.strangers))


def _node(number: int) -> dict[str, Any]:
    labels = {"kubernetes.io/hostname": node(number), "topology.kubernetes.io/zone": f"zone-{number % 3}"}
    return {"metadata": {"name": node(number), "labels": labels}}


def node(number: int) -> str:
    """Return a node's name."""
    return f"bench-{number:04}"


def _children(stored: dict[str, Any]) -> list[dict[str, Any]]:
    read = InferencePool.model_validate({"metadata": _known(stored["metadata"]), "spec": stored["spec"]})
    made = plan(Observed(read), Settings(), 0.0)
    return [dict(action.body) for action in made.actions if isinstance(action, Apply)]


def _known(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: metadata[key] for key in ("name", "namespace", "uid", "generation")}


def _reports(bodies: list[dict[str, Any]]) -> Iterator[Request]:
    """Say what controllers would say of sets whose pods run."""
    for body in bodies:
        count = body["spec"]["replicas"]
        path = f"{list_path(body['kind'], NAMESPACE)}/{body['metadata']['name']}/status"
        numbers = {"observedGeneration": 1, "replicas": count, "readyReplicas": count, "availableReplicas": count}
        yield "PATCH", path, {"status": numbers}


def _pods(children: list[dict[str, Any]], nodes: int) -> Iterator[dict[str, Any]]:
    number = 0
    for body in children:
        if body["kind"] not in ("StatefulSet", "Deployment"):
            continue
        template = body["spec"]["template"]
        for ordinal in range(body["spec"]["replicas"]):
            number += 1
            name = f"{body['metadata']['name']}-{ordinal}"
            metadata = {**template["metadata"], "name": name, "namespace": NAMESPACE}
            yield {"metadata": metadata, "spec": {**template["spec"], "nodeName": node(number % nodes)}}


def status(body: dict[str, Any], ready: bool = True) -> dict[str, Any]:
    """Return the status patch of a pod that runs, and is ready or not."""
    names = [container["name"] for container in body["spec"]["containers"]]
    words = "True" if ready else "False"
    kinds = {"PodScheduled": "True", "Initialized": "True", "ContainersReady": words, "Ready": words}
    # Gates stay: they are cleared by nothing that happens here.
    kinds.update({gate["conditionType"]: "True" for gate in body["spec"].get("readinessGates", ())})
    running = {"state": {"running": {"startedAt": _NOW}}, "ready": ready, "restartCount": 0}
    return {
        "status": {
            "phase": "Running",
            "podIP": "10.1.2.3",
            "conditions": [{"type": kind, "status": said, "lastTransitionTime": _NOW} for kind, said in kinds.items()],
            "containerStatuses": [{"name": name, "image": "x", "imageID": "x", **running} for name in names],
        }
    }


def _stranger(number: int, nodes: int) -> dict[str, Any]:
    container = {
        "name": "app",
        "image": "somebody/app:1",
        "env": [{"name": f"V{i}", "value": "x" * 40} for i in range(8)],
    }
    return {
        "metadata": {"name": f"stranger-{number:05}", "labels": {"app": f"app-{number % 400}"}},
        "spec": {"containers": [container], "nodeName": node(number % nodes)},
    }
