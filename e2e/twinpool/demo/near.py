"""A pool whose groups span nodes, on a cluster of labelled nodes: what the scenarios of placement share."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import yaml

from twinpool.core import protocol
from twinpool.demo.scenario import condition, pool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from twinpool.localcluster.cluster import LocalCluster

    #: Starts a cluster of its own for a purpose, with these nodes.
    OwnCluster = Callable[[str, Sequence[Mapping[str, Any]]], AbstractContextManager[LocalCluster]]

NAME = "near"
CLIQUE = "nvidia.com/gpu.clique"
#: One replica on two nodes of two GPUs, all of which share every layer.
WIDE: dict[str, Any] = {
    "parallelism": {"tensor": 4},
    "resources": {"gpu": {"perNode": 2}},
    "drainTimeout": "1s",
    # The simulated engine needs no GPU; these pods ask for some, so that they are placed as others would be.
    "podTemplate": {"spec": {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]}},
}
MANIFEST: dict[str, Any] = {
    "apiVersion": protocol.API_VERSION,
    "kind": protocol.KIND,
    "metadata": {"name": NAME},
    "spec": {"model": {"name": "tiny"}, "engine": {"kind": "simulated"}, "decode": WIDE, "placement": {}},
}


class Pool:
    """The pool of a test, in a namespace of its own."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def kubectl(self, *arguments: str, **options: Any) -> str:
        """Run kubectl in the namespace and return what it prints."""
        return self.cluster.kubectl("-n", self.namespace, *arguments, **options).stdout

    def apply(self, spec: dict[str, Any] | None = None) -> None:
        """Apply the pool with other blocks in its spec."""
        manifest = copy.deepcopy(MANIFEST)
        manifest["spec"] |= spec or {}
        self.kubectl("apply", "-f", "-", input=yaml.safe_dump(manifest))

    def workers(self) -> list[dict[str, Any]]:
        """Return the worker pods that are to stay, by name."""
        selector = f"{protocol.LABEL_POOL}={NAME},{protocol.LABEL_ROLE}=decode"
        items = self.cluster.json("-n", self.namespace, "get", "pods", "-l", selector)["items"]
        live = [item for item in items if not item["metadata"].get("deletionTimestamp")]
        return sorted(live, key=lambda pod: str(pod["metadata"]["name"]))

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition of the pool, empty while there is none."""
        return condition(pool(self.cluster, self.namespace, NAME), kind)

    def ready(self) -> bool:
        """Return whether the pool serves."""
        return self.condition("Ready").get("status") == "True"

    def short(self) -> dict[str, Any] | None:
        """Return the condition that says that groups have no nodes, None when they have."""
        found = self.condition("Placed")
        return found if found.get("status") == "False" else None

    def occupy(self, node: str, gpus: int, **spec: Any) -> str:
        """Start a pod of somebody else on a node, and return its name."""
        container = {
            "name": "other",
            "image": "twinpool/worker:dev",
            "command": ["sleep", "3600"],
            "resources": {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {},
        }
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"other-{node}", "labels": {"app": "other"}},
            "spec": {"nodeName": node, "terminationGracePeriodSeconds": 0, "containers": [container], **spec},
        }
        self.kubectl("apply", "-f", "-", input=yaml.safe_dump(body))
        return f"other-{node}"


def nodes(pods: list[dict[str, Any]]) -> list[str]:
    """Return the node of each pod, empty for one that has none."""
    return [pod["spec"].get("nodeName", "") for pod in pods]
