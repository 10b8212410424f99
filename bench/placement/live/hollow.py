"""Nodes without processes: objects whose Leases are renewed, so that the control plane takes them for alive.

kube-scheduler binds pods to them and nothing runs there. A pod that is deleted goes at once, as on a node whose
containers end at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bench.operator.api import Api, ApiFailed
from bench.placement.live.waiting import LOOK, until

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds between two renewals: a local cluster gives nodes up after 8.
RENEW = 1.6
#: Seconds until the control plane has looked at new nodes.
PATIENCE = 60.0
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


class HollowNodes:
    """The nodes of one case, for the time of an ``async with`` block."""

    def __init__(self, api: Api, nodes: Sequence[dict[str, Any]]) -> None:
        self._api = api
        self._nodes = nodes
        self.names = {node["metadata"]["name"] for node in nodes}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> HollowNodes:
        """Make the nodes, and return when the control plane has judged them."""
        await self._api.send_all([("POST", _LEASES, _lease(name)) for name in sorted(self.names)])
        await self._api.send_all([("POST", "/api/v1/nodes", node) for node in self._nodes])
        self._tasks = [asyncio.create_task(self._renew()), asyncio.create_task(self._bury())]
        await until(self._states, self._judged, PATIENCE, str)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Take the nodes away."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._api.send_all([("DELETE", f"/api/v1/nodes/{name}", None) for name in sorted(self.names)])
        await self._api.send_all([("DELETE", f"{_LEASES}/{name}", None) for name in sorted(self.names)])

    async def _states(self) -> dict[str, bool]:
        """Return of each node whether it has the taints of its state and no others."""
        found = (await self._api.send("GET", "/api/v1/nodes"))["items"]
        return {node["metadata"]["name"]: _settled(node) for node in found}

    def _judged(self, states: dict[str, bool]) -> bool:
        return all(states.get(name, False) for name in self.names)

    async def _renew(self) -> None:
        while True:
            for name in sorted(self.names):
                body = {"spec": {"renewTime": _now()}}
                await self._api.send("PATCH", f"{_LEASES}/{name}", body, "application/merge-patch+json")
            await asyncio.sleep(RENEW)

    async def _bury(self) -> None:
        """Do for pods that end what a kubelet does last."""
        while True:
            for pod in (await self._api.send("GET", "/api/v1/pods"))["items"]:
                meta = pod["metadata"]
                if meta.get("deletionTimestamp") and pod["spec"].get("nodeName") in self.names:
                    path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
                    with contextlib.suppress(ApiFailed):  # it went meanwhile
                        await self._api.send(
                            "DELETE", path, {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
                        )
            await asyncio.sleep(LOOK)


def _settled(node: dict[str, Any]) -> bool:
    taints = {taint["key"] for taint in node["spec"].get("taints") or ()}
    ready = next(item["status"] for item in node["status"]["conditions"] if item["type"] == "Ready")
    return ("node.kubernetes.io/not-ready" in taints) == (ready != "True") and (
        "node.kubernetes.io/unschedulable" in taints
    ) == bool(node["spec"].get("unschedulable"))


def _lease(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 8, "renewTime": _now()},
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
