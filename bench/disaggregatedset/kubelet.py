"""A stand-in for kubelets: every pod of a namespace is said to run and to be ready at once, as far as its gates allow.

Controllers are measured, not engines; so nothing runs, and what takes time is what they do.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.operator.api import Api, ApiFailed
from bench.operator.objects import status

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

#: On every pod: which version of its template made it.
VERSION = "bench/version"
_STRATEGIC = "application/strategic-merge-patch+json"


@dataclass(frozen=True, slots=True)
class Seen:
    """A pod as it was seen last."""

    version: str
    ready: bool


class Kubelet:
    """Follows the pods of a namespace on a thread of its own, for the time of a ``with`` block."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._kubeconfig = kubeconfig
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"kubelet of {namespace}", daemon=True)
        self._pods: dict[str, Seen] = {}
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> Kubelet:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """End."""
        self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
        self._thread.join(10)

    def count(self) -> int:
        """Return how many pods there are."""
        return len(self._pods)

    def whole(self, version: str, count: int) -> bool:
        """Return whether there are just so many pods, all ready and of this version."""
        found = list(self._pods.values())
        return len(found) == count and all(pod.ready and pod.version == version for pod in found)

    def _run(self) -> None:
        self._task = self._loop.create_task(self._follow())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _follow(self) -> None:
        async with Api(self._kubeconfig) as api:
            found = await api.send("GET", self._path)
            for pod in found["items"]:
                await self._look(api, pod)
            async for event in api.watch(self._path, found["metadata"]["resourceVersion"]):
                pod = event["object"]
                if event["type"] == "DELETED":
                    self._pods.pop(pod["metadata"]["name"], None)
                else:
                    await self._look(api, pod)

    async def _look(self, api: Api, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        is_ready = _says(pod, "Ready")
        version = pod["metadata"].get("annotations", {}).get(VERSION, "")
        self._pods[name] = Seen(version, is_ready)
        gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates", ())]
        may = all(_says(pod, gate) for gate in gates)
        if pod["metadata"].get("deletionTimestamp") or (_says(pod, "ContainersReady") and is_ready == may):
            return
        wanted = status(pod)["status"]
        # The gates are others' to open.
        conditions = [item for item in wanted["conditions"] if item["type"] not in gates]
        conditions = [{**item, "status": str(may)} if item["type"] == "Ready" else item for item in conditions]
        try:
            await api.send(
                "PATCH", f"{self._path}/{name}/status", {"status": {**wanted, "conditions": conditions}}, _STRATEGIC
            )
        except ApiFailed:
            return  # it went meanwhile


def _says(pod: dict[str, Any], kind: str) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(item["type"] == kind and item["status"] == "True" for item in conditions)
