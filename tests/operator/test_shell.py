"""The shell carries plans out, says what was refused, and never takes what is not the pool's."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Annotate, Apply, Delete, PutBack, Retire, ScaleToZero, SetGate, WriteScaling
from twinpool.operator.logic.drift import stamped
from twinpool.operator.logic.observed import Refusal, read_child
from twinpool.operator.logic.settings import Settings
from twinpool.operator.shell.apply import Executor, NotLeader
from twinpool.operator.shell.cluster import ApiRefused, list_path, object_path
from twinpool.operator.shell.loop import RESYNC, Reconciler
from twinpool.operator.shell.metrics import Metrics
from twinpool.operator.shell.observe import Memory, observe, read_pool
from twinpool.operator.shell.questions import EngineLives, RouterBooks
from twinpool.operator.shell.queue import WorkQueue
from twinpool.operator.shell.watch import Cache, watch_registry, watch_settings

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = ("team", "demo")
OWNER = {"kind": protocol.KIND, "name": "demo", "uid": "uid-pool", "controller": True}


class Leader:
    """A Lease that is held, or not."""

    def __init__(self) -> None:
        self.valid = True
        self.held = asyncio.Event()
        self.held.set()


class FakeCluster:
    """Records requests; answers what it was given, with what was stored for the rest."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.stored: dict[str, dict[str, Any]] = {}
        self.errors: dict[str, list[ApiRefused]] = {}
        self.statuses: list[dict[str, Any]] = []
        self.bodies: list[dict[str, Any]] = []

    def _note(self, verb: str, name: str) -> None:
        self.requests.append((verb, name))
        if self.errors.get(verb):
            raise self.errors[verb].pop(0)

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        self._note("get", name)
        if name not in self.stored:
            raise ApiRefused(404, "not found")
        return self.stored[name]

    async def apply(self, body: Any) -> dict[str, Any]:
        self._note("apply", body["metadata"]["name"])
        self.bodies.append(body)
        return copy.deepcopy(body)

    async def merge(self, kind: str, namespace: str, name: str, body: Any) -> dict[str, Any]:
        self._note("merge", name)
        self.bodies.append(body)
        return copy.deepcopy({**body, "metadata": {"name": name, **body["metadata"]}})

    async def set_pod_condition(self, namespace: str, name: str, uid: str, condition: Any) -> dict[str, Any]:
        self._note("condition", name)
        self.bodies.append(condition)
        return {}

    async def delete(self, kind: str, namespace: str, name: str, uid: str, resource_version: str) -> None:
        self._note("delete", name)

    async def apply_scaling(self, namespace: str, name: str, uid: str, version: str, scaling: Any) -> dict[str, Any]:
        self._note("scaling", f"{name} {version}")
        self.statuses.append(scaling)
        return {}

    async def apply_status(self, namespace: str, name: str, uid: str, status: Any) -> dict[str, Any]:
        self._note("status", name)
        self.statuses.append(status)
        return {}


def service(uid: str = "") -> Apply:
    metadata = {"name": "s", "namespace": "team", "labels": {}, "ownerReferences": [OWNER]}
    return Apply(stamped({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"x": 1}}), uid)


def stranger(name: str = "s", **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": "u9", "ownerReferences": [], **metadata}}


def executor(cluster: FakeCluster, leader: Leader | None = None) -> Executor:
    return Executor(cluster, leader or Leader(), Memory())  # type: ignore[arg-type]


async def test_an_unknown_object_is_looked_for_before_it_is_applied() -> None:
    cluster = FakeCluster()
    assert await executor(cluster).execute(KEY, (service(),)) == ()
    assert cluster.requests == [("get", "s"), ("apply", "s")]
    assert "uid" not in cluster.bodies[0]["metadata"]


async def test_a_strangers_object_is_not_taken_over() -> None:
    cluster = FakeCluster()
    cluster.stored["s"] = stranger()
    (refusal,) = await executor(cluster).execute(KEY, (service(),))
    assert (refusal.kind, refusal.name) == ("Service", "s")
    assert "is not the pool's" in refusal.message
    assert ("apply", "s") not in cluster.requests


async def test_numbers_of_groups_are_written_for_the_pool_that_was_observed_and_a_newer_one_is_left_alone() -> None:
    cluster, metrics = FakeCluster(), Metrics()
    writes = Executor(cluster, Leader(), Memory(), metrics)  # type: ignore[arg-type]
    scaling = {"target": {"prefill": 1, "decode": 2}, "reason": "work"}
    assert await writes.execute(KEY, (WriteScaling("demo", "u", "7", scaling, changes=True),)) == ()
    assert await writes.execute(KEY, (WriteScaling("demo", "u", "8", None),)) == ()
    assert (cluster.requests, cluster.statuses) == ([("scaling", "demo 7"), ("scaling", "demo 8")], [scaling, None])
    assert "twinpool_operator_scaling_changes_total 1.0" in metrics.text().decode()
    cluster.errors["scaling"] = [ApiRefused(409, "the object has been modified")]
    assert await writes.execute(KEY, (WriteScaling("demo", "u", "7", scaling, changes=True),)) == ()
    assert "twinpool_operator_scaling_changes_total 1.0" in metrics.text().decode()


async def test_our_own_object_that_the_watch_does_not_show_is_repaired() -> None:
    cluster = FakeCluster()
    cluster.stored["s"] = stranger(ownerReferences=[OWNER])
    await executor(cluster).execute(KEY, (service(),))
    assert cluster.bodies[0]["metadata"]["uid"] == "u9"


async def test_an_orphan_with_our_labels_is_adopted() -> None:
    cluster = FakeCluster()
    labels = {protocol.LABEL_MANAGED_BY: "twinpool", protocol.LABEL_POOL: "demo"}
    cluster.stored["s"] = stranger(labels=labels)
    await executor(cluster).execute(KEY, (service(),))
    assert cluster.bodies[0]["metadata"]["uid"] == "u9"


async def test_a_list_that_apply_cannot_repair_is_replaced() -> None:
    cluster = FakeCluster()
    cluster.errors["apply"] = [ApiRefused(422, "spec.ports[1].name: Duplicate value")]
    assert await executor(cluster).execute(KEY, (service("u1"),)) == ()
    assert cluster.requests == [("apply", "s"), ("merge", "s")]


async def test_what_is_refused_is_reported_and_the_rest_goes_on() -> None:
    cluster = FakeCluster()
    cluster.errors = {"apply": [ApiRefused(422, "bad")], "merge": [ApiRefused(403, "no")]}
    actions = (service(), Retire("g", "u", "1", "2026-01-01T00:00:00Z"), Delete("Service", "s", "u", "1"))
    assert await executor(cluster).execute(KEY, actions) == (
        Refusal("Service", "s", "bad"),
        Refusal("StatefulSet", "g", "no"),
    )
    assert ("delete", "s") in cluster.requests


@pytest.mark.parametrize("code", [404, 409])
async def test_stale_actions_are_dropped(code: int) -> None:
    cluster = FakeCluster()
    cluster.errors = {verb: [ApiRefused(code, "stale")] for verb in ("apply", "merge", "delete", "status")}
    actions = (service("u"), Retire("g", "u", "1", "2026-01-01T00:00:00Z"), Delete("Service", "s", "u", "1"))
    assert await executor(cluster).execute(KEY, actions) == ()
    await executor(cluster).write_status(KEY, "u", {}, {"a": 1})


@pytest.mark.parametrize("code", [0, 429, 500, 503])
async def test_a_server_in_trouble_ends_the_plan(code: int) -> None:
    cluster = FakeCluster()
    cluster.errors = {"get": [ApiRefused(code, "trouble")], "status": [ApiRefused(code, "trouble")]}
    with pytest.raises(ApiRefused):
        await executor(cluster).execute(KEY, (service(),))
    with pytest.raises(ApiRefused):
        await executor(cluster).write_status(KEY, "u", {}, {"a": 1})


async def test_a_group_leaves_step_by_step() -> None:
    cluster, metrics, memory = FakeCluster(), Metrics(), Memory()
    made = Executor(cluster, Leader(), memory, metrics)  # type: ignore[arg-type]
    actions = (
        Retire("g", "u", "1", "2026-01-01T00:00:00Z"),
        Annotate("Pod", "g-0", "p", protocol.ANNOTATION_DRAINING, "2026-01-01T00:00:00Z"),
        Annotate("Pod", "g-1", "q", protocol.ANNOTATION_DRAINING, None),
        SetGate("g-0", "p", False, "Draining", "the group is on its way out"),
        ScaleToZero("g", "u", "2", "drained"),
    )
    assert await made.execute(KEY, actions) == ()
    assert [verb for verb, _ in cluster.requests] == ["merge", "merge", "merge", "condition", "merge"]
    marked, first, second, gate, scaled = cluster.bodies
    assert marked["metadata"]["resourceVersion"] == "1"
    assert marked["metadata"]["annotations"] == {
        "serving.twinpool.dev/retired": "true",
        "serving.twinpool.dev/draining": "2026-01-01T00:00:00Z",
    }
    assert first["metadata"] == {"uid": "p", "annotations": {protocol.ANNOTATION_DRAINING: "2026-01-01T00:00:00Z"}}
    assert second["metadata"] == {"uid": "q", "annotations": {protocol.ANNOTATION_DRAINING: None}}
    assert (gate["type"], gate["status"], gate["reason"]) == (protocol.ROUTABLE_GATE, "False", "Draining")
    assert scaled == {"metadata": {"uid": "u", "resourceVersion": "2"}, "spec": {"replicas": 0}}
    assert metrics.registry.get_sample_value("twinpool_operator_drains_total", {"result": "drained"}) == 1
    # What the watches still show is older than what was written, and planned with no more.
    old = read_child("StatefulSet", {"metadata": {"name": "g", "uid": "u", "resourceVersion": "1"}})
    (known,) = memory.newest(KEY, [old])
    assert (known.resource_version, known.content["spec"]) == ("2", {"replicas": 0})
    newer = dataclasses.replace(old, resource_version="3")
    assert memory.newest(KEY, [newer]) == [newer]
    assert memory.newest(KEY, [old]) == [old], "what was shown once needs no memory any more"


async def test_a_group_that_is_missed_loses_its_marks() -> None:
    cluster = FakeCluster()
    until = "2026-01-01T00:00:00Z"
    actions = (Retire("g", "u", "1", until, until), PutBack("g", "u", "2"))
    assert await executor(cluster).execute(KEY, actions) == ()
    marked, back = (body["metadata"] for body in cluster.bodies)
    assert marked["annotations"][names.KEPT_ANNOTATION] == until
    assert back["resourceVersion"] == "2"
    assert back["annotations"] == dict.fromkeys(marked["annotations"])


async def test_a_refused_mark_is_reported_as_its_pods() -> None:
    cluster = FakeCluster()
    cluster.errors = {"merge": [ApiRefused(403, "no")], "condition": [ApiRefused(403, "no")]}
    actions = (Annotate("Pod", "g-0", "p", protocol.ANNOTATION_DRAINING, "x"), SetGate("g-0", "p", True, "Listed", "x"))
    assert await executor(cluster).execute(KEY, actions) == (Refusal("Pod", "g-0", "no"),) * 2


async def test_nothing_is_written_without_the_lease() -> None:
    cluster, leader = FakeCluster(), Leader()
    leader.valid = False
    with pytest.raises(NotLeader):
        await executor(cluster, leader).execute(KEY, (service(),))
    with pytest.raises(NotLeader):
        await executor(cluster, leader).write_status(KEY, "u", {}, {"a": 1})
    with pytest.raises(NotLeader):
        await executor(cluster, leader).restore_labels(KEY, "u", "g")
    assert not cluster.requests


async def test_an_equal_status_is_not_written() -> None:
    cluster = FakeCluster()
    await executor(cluster).write_status(KEY, "u", {"a": 1}, {"a": 1})
    assert not cluster.requests


async def test_a_group_that_lost_its_labels_gets_them_back() -> None:
    cluster = FakeCluster()
    cluster.stored["g"] = stranger("g", ownerReferences=[OWNER])
    assert await executor(cluster).restore_labels(KEY, "uid-pool", "g")
    assert cluster.bodies == [
        {
            "metadata": {
                "uid": "u9",
                "labels": {protocol.LABEL_MANAGED_BY: "twinpool", protocol.LABEL_POOL: "demo"},
            }
        }
    ]


async def test_a_group_that_is_gone_stays_gone() -> None:
    cluster = FakeCluster()
    assert not await executor(cluster).restore_labels(KEY, "uid-pool", "g")
    cluster.stored["g"] = stranger("g")
    assert not await executor(cluster).restore_labels(KEY, "uid-pool", "g")
    cluster.stored["g"] = stranger("g", ownerReferences=[OWNER], deletionTimestamp="2026-01-01T00:00:00Z")
    assert not await executor(cluster).restore_labels(KEY, "uid-pool", "g")
    cluster.errors["get"] = [ApiRefused(500, "trouble")]
    with pytest.raises(ApiRefused):
        await executor(cluster).restore_labels(KEY, "uid-pool", "g")


def test_a_rewritten_value_is_remembered_until_the_object_changes_or_is_forgotten() -> None:
    memory, wanted = Memory(), dict(service().body)
    answer = {**wanted, "metadata": {**wanted["metadata"], "uid": "u"}, "spec": {"x": "1Gi"}}
    memory.applied(KEY, wanted, answer)
    child = read_child("Service", answer)
    assert memory.with_settled(KEY, child).settled is not None
    edited = read_child("Service", {**answer, "spec": {"x": "2Gi"}})
    assert memory.with_settled(KEY, edited).settled is None
    memory.forget(KEY)
    assert memory.with_settled(KEY, child).settled is None
    memory.applied(KEY, wanted, answer)
    memory.applied(KEY, wanted, {**answer, "spec": wanted["spec"]})
    assert memory.with_settled(KEY, child).settled is None


def test_refusals_are_news_once() -> None:
    memory = Memory()
    refusals = (Refusal("Service", "s", "bad"),)
    assert memory.refused(KEY, refusals)
    assert not memory.refused(KEY, refusals)
    assert memory.refusals(KEY) == refusals
    assert memory.refused(KEY, ())
    assert memory.refusals(KEY) == ()


def test_children_of_an_earlier_pool_of_the_name_are_not_taken_for_its_own(make_pool: Callable[..., Any]) -> None:
    cache = Cache()
    cache.put("Service", "u1", KEY, read_child("Service", stranger()))
    cache.put("Service", "u2", KEY, read_child("Service", stranger("t", ownerReferences=[OWNER])))
    seen = observe(KEY, make_pool(), cache, Memory(), 0.0)
    assert [child.name for child in seen.children] == ["t"]


def test_paths() -> None:
    assert object_path("StatefulSet", "n", "s") == "/apis/apps/v1/namespaces/n/statefulsets/s"
    assert list_path(protocol.KIND, "") == "/apis/serving.twinpool.dev/v1alpha1/inferencepools"
    assert object_path("Service", "n/../x", "s?") == "/api/v1/namespaces/n%2F..%2Fx/services/s%3F"


def test_kopf_is_told_to_write_nothing_and_to_receive_only_what_is_ours() -> None:
    settings = watch_settings()
    assert settings.posting.enabled is False
    assert settings.scanning.disabled is True
    assert settings.peering.standalone is True
    ours = "app.kubernetes.io/managed-by=twinpool"
    assert set(settings.watching.label_selectors.values()) == {ours, f"{ours},!serving.twinpool.dev/group"}
    registry = watch_registry(Cache(), lambda *_: None)
    assert not registry._spawning.get_all_handlers()
    assert not registry._changing.get_all_handlers()


class Bench:
    """A reconciler with a cache that the test fills."""

    def __init__(self, pool: dict[str, Any] | None) -> None:
        self.cluster, self.leader, self.queue = FakeCluster(), Leader(), WorkQueue[tuple[str, str]]()
        self.cache, self.metrics = Cache(), Metrics()
        if pool:
            self.cache.put(protocol.KIND, "uid-pool", KEY, pool)
        memory = Memory()
        made = Executor(self.cluster, self.leader, memory)  # type: ignore[arg-type]
        self.reconciler = Reconciler(
            self.cache,
            self.queue,
            self.leader,
            made,
            memory,
            Settings(),
            self.metrics,
            RouterBooks(self.queue.add),
            EngineLives(self.queue.add),
            lambda: 1e9,  # type: ignore[arg-type]
        )

    async def once(self) -> None:
        """Work until the pool was looked at once."""
        self.queue.add(KEY)
        task = asyncio.create_task(self.reconciler.work())
        while len(self.queue) or self.reconciler.running:  # noqa: ASYNC110 - nothing tells that the work has ended
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def count(self, result: str) -> float:
        value = self.metrics.registry.get_sample_value("twinpool_operator_reconciles_total", {"result": result})
        return value or 0.0


def stored_pool(**changes: Any) -> dict[str, Any]:
    metadata = {"name": "demo", "namespace": "team", "uid": "uid-pool", "generation": 1, "creationTimestamp": "x"}
    body = {"metadata": metadata, "spec": {"model": {"name": "a/b"}, "decode": {"replicas": 1}}, "status": {}}
    return {**body, **changes}


async def test_a_pool_is_brought_up_and_looked_at_again_later() -> None:
    bench = Bench(stored_pool())
    await bench.once()
    applied = [name for verb, name in bench.cluster.requests if verb == "apply"]
    assert applied[:6] == ["demo-router"] * 5 + ["demo-decode"]
    assert len(applied) == 9, "a budget, a revision and a group are the last three"
    assert bench.cluster.statuses[0]["decode"]["desired"] == 1
    assert bench.count("done") == 1
    assert asyncio.get_running_loop().time() + RESYNC >= bench.queue._later[KEY].when()


async def test_a_pool_that_is_gone_or_going_is_left_alone() -> None:
    for pool in (
        None,
        stored_pool(metadata={**stored_pool()["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}),
    ):
        bench = Bench(pool)
        bench.reconciler.gone[KEY] = {"g"}
        await bench.once()
        assert not bench.cluster.requests
        assert not bench.reconciler.gone


async def test_a_pool_that_cannot_be_read_says_so() -> None:
    bench = Bench(stored_pool(spec={"model": {}}))
    await bench.once()
    assert bench.cluster.statuses[0]["conditions"][0]["reason"] == "InvalidSpec"


async def test_a_refusal_is_in_the_status_at_once_and_tried_again() -> None:
    bench = Bench(stored_pool())
    bench.cluster.errors["apply"] = [ApiRefused(422, "metadata.x: bad")]
    await bench.once()
    progressing = {item["type"]: item for item in bench.cluster.statuses[0]["conditions"]}["Progressing"]
    assert (progressing["reason"], "metadata.x: bad" in progressing["message"]) == ("Refused", True)
    assert bench.queue._later[KEY].when() < asyncio.get_running_loop().time() + 5


async def test_groups_that_only_lost_their_labels_are_not_replaced() -> None:
    bench = Bench(stored_pool())
    bench.cluster.stored["g"] = stranger("g", ownerReferences=[OWNER])
    bench.reconciler.gone[KEY] = {"g"}
    await bench.once()
    assert bench.cluster.requests == [("get", "g"), ("merge", "g")]


async def test_errors_are_counted_and_tried_again() -> None:
    bench = Bench(stored_pool())
    bench.cluster.errors["apply"] = [ApiRefused(503, "busy")]
    await bench.once()
    assert bench.count("api_error") == 1
    broken = Bench(stored_pool())
    broken.cluster.errors["apply"] = [RuntimeError("bug")]  # type: ignore[list-item]
    await broken.once()
    assert broken.count("bug") == 1
    assert KEY in broken.queue._later


async def test_a_lease_that_is_lost_in_the_middle_leaves_the_pool_for_later() -> None:
    bench = Bench(stored_pool())
    bench.leader.valid = False
    await asyncio.wait_for(bench.once(), 5)
    assert bench.count("not_leader") == 1
    assert not bench.cluster.requests
    assert KEY in bench.queue._later


async def test_after_draining_nothing_is_begun() -> None:
    bench = Bench(stored_pool())
    await bench.reconciler.drain(1.0)
    bench.queue.add(KEY)
    await bench.reconciler.work()
    assert not bench.cluster.requests


async def test_draining_waits_for_what_is_running_but_not_for_ever() -> None:
    bench = Bench(stored_pool())
    go_on = asyncio.Event()

    async def slow(body: Any) -> dict[str, Any]:
        await go_on.wait()
        return copy.deepcopy(body)

    bench.cluster.apply = slow  # type: ignore[method-assign]
    bench.queue.add(KEY)
    task = asyncio.create_task(bench.reconciler.work())
    while not bench.reconciler.running:  # noqa: ASYNC110 - nothing tells that the work has begun
        await asyncio.sleep(0)
    await bench.reconciler.drain(0.01)
    assert bench.reconciler.running
    go_on.set()
    await bench.reconciler.drain(5.0)
    assert not bench.reconciler.running
    await task


def test_a_pool_is_read_with_its_status() -> None:
    pool = read_pool(stored_pool(status={"revision": "r"}))
    assert pool.status.revision == "r"
    assert pool.spec.decode.replicas == 1


async def test_what_is_applied_must_still_be_what_was_observed() -> None:
    cluster = FakeCluster()
    await executor(cluster).execute(KEY, (Apply(service().body, "u1", "7"),))
    assert (cluster.bodies[0]["metadata"]["uid"], cluster.bodies[0]["metadata"]["resourceVersion"]) == ("u1", "7")
    cluster.stored["s"] = stranger(ownerReferences=[OWNER], resourceVersion="9")
    await executor(cluster).execute(KEY, (service(),))
    assert cluster.bodies[1]["metadata"]["resourceVersion"] == "9"


async def test_a_lease_that_ends_while_an_object_is_looked_for_stops_the_write() -> None:
    cluster, leader = FakeCluster(), Leader()
    looked_up = cluster.get

    async def slow(kind: str, namespace: str, name: str) -> dict[str, Any]:
        leader.valid = False
        return await looked_up(kind, namespace, name)

    cluster.get = slow  # type: ignore[method-assign]
    with pytest.raises(NotLeader):
        await executor(cluster, leader).execute(KEY, (service(),))
    assert cluster.requests == [("get", "s")]


@pytest.mark.looptime
async def test_a_flapping_child_causes_at_most_one_status_write_a_second() -> None:
    bench = Bench(stored_pool())
    task = asyncio.create_task(bench.reconciler.work())
    began = asyncio.get_running_loop().time()
    for _ in range(100):
        bench.reconciler.event(KEY, "")
        await asyncio.sleep(0.1)
    seconds = asyncio.get_running_loop().time() - began
    # The cache never shows what was written, so that every plan wants to write.
    assert seconds - 1 <= len(bench.cluster.statuses) <= seconds + 1
    task.cancel()


async def test_trouble_is_waited_for_as_long_as_the_server_asks() -> None:
    bench = Bench(stored_pool())
    bench.cluster.errors["apply"] = [ApiRefused(429, "slow down", 33.0)]
    await bench.once()
    assert bench.queue._later[KEY].when() > asyncio.get_running_loop().time() + 30


async def test_a_plan_that_could_not_be_carried_out_is_in_the_journal() -> None:
    bench = Bench(stored_pool())
    bench.cluster.errors["apply"] = [ApiRefused(503, "busy")]
    await bench.once()
    (entry,) = bench.reconciler._journal.show(KEY) or []
    assert entry["result"] == "not carried out"


async def test_the_time_to_react_is_that_of_the_leader_alone() -> None:
    bench = Bench(stored_pool())
    bench.leader.held.clear()
    bench.reconciler.event(KEY, "")
    assert not bench.reconciler._asked
    bench.leader.held.set()
    bench.reconciler.event(KEY, "")
    await bench.once()
    count = bench.metrics.registry.get_sample_value("twinpool_operator_reaction_seconds_count")
    assert count == 1
