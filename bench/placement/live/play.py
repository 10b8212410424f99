"""One random case on a real control plane: foretell, apply, wait, judge."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import yaml

from bench.placement.live import judge
from bench.placement.live.cases import Drawn, drawn
from bench.placement.live.hollow import HollowNodes
from bench.placement.live.judge import Scene
from bench.placement.live.waiting import until
from twinpool.cli.__main__ import main
from twinpool.core import protocol
from twinpool.localcluster.waiting import WaitTimeout
from twinpool.operator.logic.placement.affinity import pinned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.operator.api import Api
    from twinpool.localcluster.cluster import Cluster

Body = dict[str, Any]
_POOLS = f"/apis/{protocol.API_VERSION}/namespaces/{{}}/{protocol.PLURAL}"
#: Seconds for a pool to come to rest: alone, and among others, who cost it races.
ALONE, AMONG = 60.0, 240.0


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    seed: int
    competed: bool
    groups: int
    short: int
    seconds: float
    wrong: tuple[str, ...]


@contextlib.contextmanager
def command_line(cluster: Cluster) -> Iterator[None]:
    """Let ``twinpool`` in this process reach the cluster with its kubectl."""
    path = f"{Path(cluster.kubectl_path).parent}:{os.environ['PATH']}"
    before = {name: os.environ.get(name) for name in ("KUBECONFIG", "PATH")}
    os.environ.update({"KUBECONFIG": str(cluster.kubeconfig), "PATH": path})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def play(api: Api, seed: int) -> Outcome:
    """Play the case of a seed, and leave nothing of it behind."""
    began = time.monotonic()
    case = drawn(seed)
    namespace = f"case-{seed}"
    await api.send("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
    async with HollowNodes(api, case.nodes):
        await api.send_all([("POST", f"/api/v1/namespaces/{namespace}/pods", pod) for pod in case.others])
        stage = Stage(api, namespace, case)
        try:
            for pool in case.pools:
                await stage.place(pool)
            await stage.no_refusals()
        finally:
            await stage.clear()
    return Outcome(seed, bool(case.rivals), stage.groups, stage.short, time.monotonic() - began, tuple(stage.wrong))


class Stage:
    """The namespace of one case, and what was seen in it."""

    def __init__(self, api: Api, namespace: str, case: Drawn) -> None:
        self._api = api
        self._namespace = namespace
        self._case = case
        self._random = Random(case.seed)
        self.groups = self.short = 0
        self.wrong: list[str] = []

    async def place(self, pool: Body) -> None:
        """Say where a pool would go, apply it, and judge what came of it."""
        name = pool["metadata"]["name"]
        before = await self._scene(None)
        said = await asyncio.to_thread(_plan, pool, self._namespace)
        rivals = asyncio.create_task(self._rivals())
        await self._api.send("POST", _POOLS.format(self._namespace), pool)
        await rivals
        try:
            if self._case.rivals:
                scene = await self._until(
                    name, _rests_rightly, lambda seen: "; ".join(judge.short_wrongly(seen)), AMONG
                )
            else:
                # What a pool says of itself is a step behind, so it is waited for; pods that are bound stay.
                told = len(said["groups"])
                scene = await self._until(
                    name,
                    lambda seen: seen.rests and len(seen.groups) == told and not judge.differences(said, seen),
                    lambda seen: "; ".join(judge.differences(said, seen)),
                    ALONE,
                )
                gangs = judge.asked_by_role(scene)
                self.wrong += judge.refused_wrongly(said, Scene(before.nodes, before.pods, (), scene.pool), gangs)
        except WaitTimeout as error:
            self.wrong.append(f"{name}: {error}")
            return
        self.wrong += judge.broken(scene)
        self.groups += len(scene.groups)
        self.short += len(scene.groups) - len(scene.whole)

    async def no_refusals(self) -> None:
        """Hold it against the case when kube-scheduler refused a pinned pod although nobody competed."""
        if self._case.rivals:
            return
        pods = (await self._api.send("GET", f"/api/v1/namespaces/{self._namespace}/pods"))["items"]
        shown = {pod["metadata"]["name"] for pod in pods if judge.shown(pod)}
        events = (await self._api.send("GET", f"/api/v1/namespaces/{self._namespace}/events"))["items"]
        for event in events:
            name = event["involvedObject"]["name"]
            if event["reason"] == "FailedScheduling" and name not in shown:
                self.wrong.append(f"kube-scheduler refused {name}, which was sent to a node: {event['message']}")

    async def clear(self) -> None:
        """Delete everything, and return when no pod is left that could go to the next case's nodes."""
        pools = _POOLS.format(self._namespace)
        pods = f"/api/v1/namespaces/{self._namespace}/pods"
        await self._api.send("DELETE", pools)
        # The garbage collector would do so too, once it has heard of the CRD: half a minute on a new cluster.
        await self._api.send("DELETE", f"/apis/apps/v1/namespaces/{self._namespace}/statefulsets")
        await self._api.send("DELETE", f"{pods}?labelSelector=!{protocol.LABEL_POOL}")
        await until(lambda: self._api.send("GET", pods), lambda seen: not seen["items"], ALONE, str)
        await self._api.send("DELETE", f"/api/v1/namespaces/{self._namespace}")

    async def _rivals(self) -> None:
        for rival in self._case.rivals:
            await asyncio.sleep(self._random.uniform(0, 0.4))
            name = f"{rival['metadata']['name']}-{self._random.randrange(10**6)}"
            await self._api.send(
                "POST", f"/api/v1/namespaces/{self._namespace}/pods", {**rival, "metadata": {"name": name}}
            )

    async def _scene(self, pool: str | None) -> Scene:
        nodes = await self._api.send("GET", "/api/v1/nodes")
        pods = await self._api.send("GET", "/api/v1/pods")
        if pool is None:
            return Scene(nodes["items"], pods["items"], (), {})
        body = await self._api.send("GET", f"{_POOLS.format(self._namespace)}/{pool}")
        path = f"/apis/apps/v1/namespaces/{self._namespace}/statefulsets?labelSelector={protocol.LABEL_POOL}%3D{pool}"
        sets = await self._api.send("GET", path)
        return Scene(nodes["items"], pods["items"], sets["items"], body)

    async def _until(
        self, pool: str, done: Callable[[Scene], bool], tell: Callable[[Scene], str], patience: float
    ) -> Scene:
        return await until(lambda: self._scene(pool), done, patience, lambda seen: f"{tell(seen)}; {_where(seen)}")


def _where(scene: Scene) -> str:
    """Return where the pods of the pool are, and what it says is short."""
    where = {
        name: [pod["spec"].get("nodeName") or pinned(pod["spec"]) or "gated" for pod in pods]
        for name, pods in scene.groups.items()
    }
    return f"{where}, {scene.short}"


def _rests_rightly(scene: Scene) -> bool:
    """What somebody else took or gave up a moment ago is noticed with the next look."""
    wanted = sum(scene.pool["spec"].get(role, {}).get("replicas", 0) for role in protocol.ROLES)
    return scene.rests and len(scene.groups) == wanted and not judge.short_wrongly(scene)


def _plan(pool: Body, namespace: str) -> Body:
    """Return what the command line says about a pool before it is applied."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file, contextlib.redirect_stdout(io.StringIO()) as told:
        yaml.safe_dump(pool, file)
        file.flush()
        main(["plan", "-f", file.name, "-n", namespace, "-o", "json"])
    found: Body = json.loads(told.getvalue())
    return found
