"""Deciding while pods wait: what is read, who is told, and that trouble ends nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import protocol
from twinpool.core.topology import preset
from twinpool.operator.logic.actions import HandOver, TakeBack
from twinpool.operator.logic.observed import read_child, read_pod
from twinpool.operator.logic.placement.model import Verdict
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings
from twinpool.operator.shell import placer as module
from twinpool.operator.shell.apply import Executor
from twinpool.operator.shell.cache import POD, Cache
from twinpool.operator.shell.cluster import ApiRefused
from twinpool.operator.shell.nodes import NodeReader
from twinpool.operator.shell.observe import Memory
from twinpool.operator.shell.placer import LONGEST, SETTLE, SHORTEST, Placer
from twinpool.operator.shell.selfcheck import compute_domains, sees_nodes
from twinpool.operator.shell.watch import kinds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from twinpool.core.spec import InferencePool

KEY = ("team", "demo")
SEES = Settings(sees_nodes=True)


class Lease:
    """A Lease that is held."""

    def __init__(self) -> None:
        self.held = asyncio.Event()
        self.held.set()
        self.valid = True


class Nodes:
    """An API server with nodes, other people's pods, and trouble on request."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.pods: list[dict[str, Any]] = []
        self.errors: list[ApiRefused] = []
        self.reads = 0
        self.refused: set[str] = set()
        self.kinds: list[str] | None = None

    async def read(self, path: str) -> dict[str, Any]:
        if self.kinds is None:
            raise ApiRefused(404, "not found")
        return {"resources": [{"kind": kind} for kind in self.kinds]}

    def node(self, name: str) -> None:
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"allocatable": {"cpu": "8", "pods": "10"}, "conditions": conditions}
        self.nodes.append({"metadata": {"name": name, "labels": {"nvidia.com/gpu.clique": name}}, "status": status})

    async def pages(self, kind: str, query: dict[str, str]) -> AsyncIterator[list[dict[str, Any]]]:
        self.reads += kind == "Node"
        if self.errors:
            raise self.errors.pop(0)
        for item in self.nodes if kind == "Node" else self.pods:
            yield [item]

    async def allowed(self, attributes: dict[str, str]) -> bool:
        if "broken" in self.refused:
            raise ApiRefused(500, "no")
        return f"{attributes['verb']} {attributes['resource']}" not in self.refused


class Scene:
    """A pool of one decode group whose pod is gated, in the cache, and the placer."""

    def __init__(self, pool: InferencePool) -> None:
        self.pool, self.api, self.cache, self.told = pool, Nodes(), Cache(), list[tuple[str, str]]()
        body = pool.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.cache.put(protocol.KIND, pool.metadata.uid, KEY, {**body, "status": {}})
        self.placer = Placer(self.api, self.cache, Lease(), preset("auto"), self.told.append)  # type: ignore[arg-type]

    def gate(self, uid: str, number: int = 0) -> str:
        """Let one of the pool's groups be there with one gated pod; return the group's name."""
        made = plan(module.Observed(self.pool), SEES, 0.0)
        bodies = [dict(action.body) for action in made.actions if action.kind == "StatefulSet"]  # type: ignore[union-attr]
        body: dict[str, Any] = bodies[number]
        body["metadata"] = {**body["metadata"], "uid": f"uid-set-{number}"}
        self.cache.put("StatefulSet", f"uid-set-{number}", KEY, read_child("StatefulSet", body))
        template = body["spec"]["template"]
        pod = {**template, "metadata": {**template["metadata"], "name": f"w-{number}", "uid": uid}}
        self.cache.put(POD, f"pod-{number}", KEY, read_pod(pod))
        name: str = body["metadata"]["name"]
        return name


@pytest.fixture
async def scene(make_pool: Callable[..., InferencePool]) -> Scene:
    decode = {"resources": {"gpu": {"perNode": 0}, "cpu": "4"}}
    return Scene(make_pool(prefill=None, placement={}, decode=decode))


async def ran(scene: Scene, seconds: float) -> None:
    task = asyncio.create_task(scene.placer.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.looptime
async def test_a_pod_that_waits_gets_a_node_and_its_pool_is_told(scene: Scene) -> None:
    name = scene.gate("u1")
    scene.api.node("n1")
    scene.placer.wake()
    await ran(scene, 5)
    assert scene.told == [KEY]
    assert scene.placer.verdicts(KEY) == {name: Verdict(("n1",), pods=frozenset({"u1"}))}
    assert scene.placer.verdicts(("other", "demo")) == {}
    assert scene.api.reads == 1, "nothing is read while nothing is short"
    scene.placer.forget_all()
    assert scene.placer.verdicts(KEY) == {}


@pytest.mark.looptime
async def test_the_groups_of_a_pool_are_decided_about_together(make_pool: Callable[..., InferencePool]) -> None:
    """A group that came first must not get the place that is best for one that comes a moment later."""
    decode = {"resources": {"gpu": {"perNode": 0}, "cpu": "4"}, "replicas": 2}
    scene = Scene(make_pool(prefill=None, placement={}, decode=decode))
    for name in ("n1", "n2"):
        scene.api.node(name)
    first = scene.gate("u1")
    scene.placer.wake()
    await ran(scene, 2)
    assert scene.api.reads == 0, "the second group is still to be made"
    second = scene.gate("u2", 1)
    await ran(scene, 1)
    assert {name: found.nodes for name, found in scene.placer.verdicts(KEY).items()}.keys() == {first, second}
    assert scene.api.reads == 1


@pytest.mark.looptime
async def test_what_does_not_come_is_not_waited_for_for_ever(make_pool: Callable[..., InferencePool]) -> None:
    decode = {"resources": {"gpu": {"perNode": 0}, "cpu": "4"}, "replicas": 2}
    scene = Scene(make_pool(prefill=None, placement={}, decode=decode))
    scene.api.node("n1")
    first = scene.gate("u1")
    scene.placer.wake()
    await ran(scene, 2 * SETTLE)
    assert scene.placer.verdicts(KEY)[first].nodes == ("n1",)


@pytest.mark.looptime
async def test_what_is_short_is_looked_at_again_after_growing_pauses(scene: Scene) -> None:
    name = scene.gate("u1")
    scene.api.node("n1")
    other = {"containers": [{"resources": {"requests": {"cpu": "5"}}}], "nodeName": "n1"}
    scene.api.pods.append({"metadata": {"namespace": "x", "name": "y"}, "spec": other})
    scene.placer.wake()
    await ran(scene, SHORTEST * 7 + 4)
    short = scene.placer.verdicts(KEY)[name].short
    assert short is not None
    assert "held by x/y" in short.message
    assert scene.api.reads == 4
    assert scene.told == [KEY], "once, since the answer stays the same"
    scene.api.pods.clear()
    await ran(scene, LONGEST)
    assert scene.placer.verdicts(KEY)[name].nodes == ("n1",)
    assert scene.told == [KEY, KEY]


@pytest.mark.looptime
async def test_what_is_short_is_looked_at_sooner_when_something_changed_but_not_all_the_time(scene: Scene) -> None:
    scene.gate("u1")
    scene.placer.wake()
    task = asyncio.create_task(scene.placer.run())
    await asyncio.sleep(SHORTEST * 16)
    reads = scene.api.reads
    for _ in range(50):
        scene.placer.look_again()
        await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert reads + 2 <= scene.api.reads <= reads + 4


@pytest.mark.looptime
async def test_trouble_is_waited_for(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.gate("u1")
    scene.api.node("n1")
    scene.api.errors.append(ApiRefused(403, "no nodes for you"))
    scene.placer.wake()
    await ran(scene, LONGEST + 2)
    assert scene.told == [KEY]
    assert "no nodes for you" in caplog.text


@pytest.mark.looptime
async def test_labels_that_make_no_sense_are_told_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.gate("u1")
    scene.api.node("n1")
    scene.api.nodes.append({"metadata": {"name": "bare"}})
    for _ in range(2):
        scene.placer.wake()
        await ran(scene, 1)
    assert caplog.text.count("node bare has no label") == 1


@pytest.mark.looptime
async def test_pools_that_cannot_be_read_or_wait_for_nothing_cost_nothing(scene: Scene) -> None:
    scene.cache.put(protocol.KIND, "x", ("team", "plain"), {"metadata": {"name": "plain"}, "spec": {}, "status": {}})
    broken = {"metadata": {"name": "broken"}, "spec": {"placement": {}, "model": 3}, "status": {}}
    scene.cache.put(protocol.KIND, "y", ("team", "broken"), broken)
    scene.placer.wake()
    await ran(scene, 1)
    assert scene.api.reads == 0
    assert scene.told == []


async def test_whether_nodes_may_be_chosen() -> None:
    api = Nodes()
    assert await sees_nodes(api)  # type: ignore[arg-type]
    for missing in ("list nodes", "delete pods", "broken"):
        api.refused = {missing}
        assert not await sees_nodes(api)  # type: ignore[arg-type]


async def test_whether_groups_can_get_compute_domains() -> None:
    api = Nodes()
    assert await compute_domains(api, "") == "NotServed"  # type: ignore[arg-type]
    api.kinds = ["ResourceClaim"]
    assert await compute_domains(api, "") == "NotServed"  # type: ignore[arg-type]
    api.kinds = ["ComputeDomain"]
    assert await compute_domains(api, "team") == "Served"  # type: ignore[arg-type]
    api.refused = {"delete computedomains"}
    assert await compute_domains(api, "team") == "NotAllowed"  # type: ignore[arg-type]
    api.refused = {"broken"}
    assert await compute_domains(api, "") == "NotServed", "who cannot ask makes none"  # type: ignore[arg-type]
    assert "ComputeDomain" in kinds(["ComputeDomain"])
    assert "ComputeDomain" not in kinds(), "a kind that is not served is not waited for"


class Pods:
    """An API server with one pod, whose patches fail on request."""

    def __init__(self, code: int, uid: str, gated: bool) -> None:
        self.code, self.deleted = code, list[tuple[str, str, str]]()
        gates = [{"name": protocol.PLACEMENT_GATE}] if gated else []
        self.pod = {"metadata": {"name": "w-0", "uid": uid}, "spec": {"schedulingGates": gates}}

    async def patch_exactly(self, *_: Any) -> dict[str, Any]:
        if self.code:
            raise ApiRefused(self.code, "refused")
        return {}

    async def get(self, *_: Any) -> dict[str, Any]:
        return self.pod

    async def delete(self, kind: str, namespace: str, name: str, uid: str, resource_version: str) -> None:
        self.deleted.append((name, uid, resource_version))


@pytest.mark.parametrize(
    ("code", "uid", "gated", "told"),
    [(0, "u", True, 0), (422, "u", True, 1), (422, "new", True, 0), (422, "u", False, 0), (403, "u", True, 1)],
)
async def test_only_a_patch_that_is_really_refused_is_told(code: int, uid: str, gated: bool, told: int) -> None:
    executor = Executor(Pods(code, uid, gated), Lease(), Memory())  # type: ignore[arg-type]
    assert len(await executor.execute(KEY, (HandOver("w-0", "u", "n1", ()),))) == told


async def test_a_pod_that_is_taken_back_is_deleted_by_uid() -> None:
    api = Pods(0, "u", True)
    await Executor(api, Lease(), Memory()).execute(KEY, (TakeBack("w-0", "u", "lost"),))  # type: ignore[arg-type]
    assert api.deleted == [("w-0", "u", "")]


async def test_labels_of_nodes_that_cannot_be_read_are_left_out(scene: Scene) -> None:
    scene.api.node("n1")
    scene.api.errors.append(ApiRefused(500, "no"))
    labels = await NodeReader(scene.api).labels({"n1", "n0"})  # type: ignore[arg-type]
    assert labels == {"n1": {"nvidia.com/gpu.clique": "n1"}}


@pytest.mark.looptime
async def test_slow_links_that_other_pools_know_are_avoided(
    scene: Scene, make_pool: Callable[..., InferencePool]
) -> None:
    name = scene.gate("u1")
    for node in ("n1", "n2"):
        scene.api.node(node)
    link = {"nodes": ["n1"], "level": "host", "measured": 1, "promised": 9, "since": "1970-01-01T00:00:00Z"}
    other = make_pool().model_dump(mode="json", by_alias=True, exclude_none=True)
    for key, status in ((("team", "other"), {"slowLinks": [link]}), (("team", "odd"), {"slowLinks": "?"})):
        scene.cache.put(protocol.KIND, key[1], key, {**other, "status": status})
    assert scene.placer._slow() == {frozenset({"n1"})}
    scene.placer.wake()
    await ran(scene, 5)
    assert scene.placer.verdicts(KEY)[name].nodes == ("n1",), "a pod without GPUs has no links inside its node"


async def test_what_the_groups_of_all_pools_measured_counts(
    scene: Scene, make_pool: Callable[..., InferencePool]
) -> None:
    since = "1970-01-01T00:00:00Z"
    link = {"level": "rack", "bandwidth": 10**10, "latency": 1e-6, "configured": 5 * 10**10, "since": since}
    body = make_pool().model_dump(mode="json", by_alias=True, exclude_none=True)
    for name, pairs in (("one", 2), ("two", 1)):
        scene.cache.put(protocol.KIND, name, ("team", name), {**body, "status": {"links": [{**link, "pairs": pairs}]}})
    made = scene.placer._known_topology()
    rack = made.levels[made.index("rack")]
    assert (rack.bandwidth, rack.measured) == (1e10, True), "three pairs in all"
