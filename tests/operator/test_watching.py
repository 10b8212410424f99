"""Silent watches, plans that are remembered, and how often a pool's status is written."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from yarl import URL

from twinpool.operator.logic.actions import Apply, Retire
from twinpool.operator.logic.observed import Child, Observed, PodView
from twinpool.operator.shell.audit import Audit
from twinpool.operator.shell.cache import Cache
from twinpool.operator.shell.cluster import ApiRefused, list_path
from twinpool.operator.shell.journal import Journal
from twinpool.operator.shell.queue import WorkQueue
from twinpool.operator.shell.streams import SILENT_AFTER, Streams
from twinpool.operator.shell.watch import Patience, kinds

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = ("team", "demo")
PODS = "/api/v1/pods"


def answered(path: str, status: int = 200, method: str = "GET") -> Any:
    content = SimpleNamespace(total_bytes=0)
    return SimpleNamespace(
        method=method, url=URL(f"https://api{path}"), response=SimpleNamespace(status=status, content=content)
    )


@pytest.mark.looptime
async def test_a_watch_that_receives_nothing_is_silent_and_one_that_gets_bookmarks_is_not() -> None:
    streams = Streams()
    pods, services = answered(f"{PODS}?watch=true"), answered("/api/v1/services?watch=true")
    for event in (pods, services):
        await streams._answered(None, None, event)
    for _ in range(5):
        await asyncio.sleep(60)
        services.response.content.total_bytes += 100
        streams.silent()
    assert streams.silent() == [PODS]
    await streams._answered(None, None, answered(f"{PODS}?watch=true"))
    assert streams.silent() == [], "a new connection is given its time"
    await asyncio.sleep(SILENT_AFTER + 1)
    assert streams.silent() == [PODS, "/api/v1/services"]


async def test_a_list_after_a_watch_is_reported_once() -> None:
    listed: list[str] = []
    streams = Streams(listed.append)
    for path in (f"{PODS}?limit=500", f"{PODS}?watch=true", f"{PODS}?limit=500", f"{PODS}?limit=500&continue=x"):
        await streams._answered(None, None, answered(path))
    await streams._answered(None, None, answered(PODS, status=410))
    await streams._answered(None, None, answered(PODS, method="POST"))
    assert listed == [PODS]


class Existing:
    """What exists, for the comparison with the caches."""

    def __init__(self, uids: set[str], single: dict[str, str]) -> None:
        self.all, self.single, self.broken = uids, single, 0

    async def uids(self, kind: str, namespace: str, selector: str) -> set[str]:
        if self.broken:
            self.broken -= 1
            raise ApiRefused(503, "busy")
        return self.all

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        if name == "odd":
            raise ApiRefused(500, "odd")
        if name not in self.single:
            raise ApiRefused(404, "gone")
        return {"metadata": {"uid": self.single[name]}}


def cached() -> Cache:
    cache = Cache()
    for name in ("here", "ghost", "young", "unlabelled"):
        cache.put("StatefulSet", f"uid-{name}", KEY, Child("StatefulSet", name, f"uid-{name}", "1", {}))
    cache.put("Pod", "uid-p", KEY, PodView("p", "decode", uid="uid-p"))
    return cache


@pytest.mark.looptime
async def test_only_what_does_not_exist_is_forgotten() -> None:
    cache, seen = cached(), []
    existing = Existing({"uid-here"}, {"young": "uid-young", "unlabelled": "uid-unlabelled"})
    audit = Audit(existing, cache, "", lambda key, name: seen.append((key, name)))  # type: ignore[arg-type]
    existing.broken = 1
    task = asyncio.create_task(audit.run())
    audit.ask("/somewhere/else")
    audit.ask("/proxy/apis/apps/v1/statefulsets")
    await asyncio.sleep(30)
    assert [child.name for child in cache.children(KEY)] == ["here", "young", "unlabelled"]
    assert (KEY, "ghost") in seen
    assert not task.done()
    audit.ask(PODS)
    await asyncio.sleep(30)
    assert cache.pods(KEY) == ()
    assert seen[-1] == (KEY, "")
    task.cancel()


async def test_an_object_that_cannot_be_read_is_kept() -> None:
    cache = Cache()
    cache.put("StatefulSet", "u", KEY, Child("StatefulSet", "odd", "u", "1", {}))
    audit = Audit(Existing(set(), {}), cache, "", lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(ApiRefused):
        await audit.compare("StatefulSet")
    assert cache.children(KEY)
    await audit.compare("Service")


def test_pauses_never_end() -> None:
    pauses = iter(Patience())
    taken = [next(pauses) for _ in range(100)]
    assert taken == sorted(taken)
    assert taken[-1] == 10.0
    assert next(iter(Patience())) == 1.0


def test_equal_plans_are_one_entry_and_old_ones_are_dropped(make_pool: Callable[..., Any]) -> None:
    journal, observed = Journal(kept=2), Observed(make_pool())
    condition = {"type": "Ready", "status": "True", "reason": "Serving"}
    status = {"conditions": [condition], "revision": "r"}
    apply = Apply({"kind": "Service", "metadata": {"name": "s"}})
    journal.note(KEY, 1.0, observed, (apply,), status, "done")
    journal.note(KEY, 2.0, observed, (), status, "done")
    journal.note(KEY, 9.0, observed, (), status, "done")
    journal.note(
        KEY, 10.0, Observed(make_pool(), pods=(PodView("p", "decode"),)), (Retire("g", "u", "1", "x"),), {}, "done"
    )
    newest, older = journal.show(KEY) or []
    assert newest["actions"] == ["retire StatefulSet g"]
    assert (older["plans"], older["from"], older["to"]) == (2, "1970-01-01T00:00:02Z", "1970-01-01T00:00:09Z")
    assert older["conditions"] == {"Ready": "True Serving"}
    assert older["status"] == {"revision": "r"}
    assert older["observed"] != newest["observed"]
    assert journal.pools() == ["team/demo"]
    journal.forget(KEY)
    assert journal.show(KEY) is None


@pytest.mark.looptime
async def test_the_age_of_the_queue_is_that_of_the_first_key() -> None:
    queue: WorkQueue[str] = WorkQueue()
    assert queue.age() == 0.0
    queue.add("a")
    await asyncio.sleep(5)
    queue.add("b")
    assert queue.age() == 5.0
    assert await queue.get() == "a"
    assert queue.age() == 0.0
    queue.done("a")
    assert queue.failed("a", at_least=30.0) == 30.0


def test_a_cache_holds_what_is_and_forgets_what_is_gone() -> None:
    cache, other = Cache(), ("team", "other")
    cache.put("InferencePool", "p1", KEY, {"metadata": {"name": "demo", "uid": "p1"}})
    cache.put("InferencePool", "p2", KEY, {"metadata": {"name": "demo", "uid": "p2"}})
    assert (cache.pool(KEY) or {})["metadata"]["uid"] == "p2", "the younger one of a name"
    assert cache.known("InferencePool") == [(KEY, "demo", "p1"), (KEY, "demo", "p2")]
    cache.put("Service", "s", KEY, Child("Service", "s", "s", "1", {}))
    cache.put("Service", "s", other, Child("Service", "s", "s", "2", {}))
    assert cache.children(KEY) == [], "its label says another pool now"
    assert [child.resource_version for child in cache.children(other)] == ["2"]
    cache.put("Service", "s", None, None)
    cache.put("Service", "nobody's", None, None)
    assert cache.children(other) == []
    assert cache.uids("Service") == {"s", "nobody's"}
    for uid in ("s", "nobody's", "never seen"):
        cache.remove("Service", uid)
    assert cache.uids("Service") == set()
    for uid in ("p1", "p2"):
        cache.remove("InferencePool", uid)
    assert (cache.pools(), cache.pool(KEY), cache.pods(KEY)) == ([], None, ())


@pytest.mark.looptime
async def test_the_caches_are_complete_when_everything_that_exists_is_in_them() -> None:
    cache, streams = Cache(), Streams()
    existing = Existing({"a"}, {})
    existing.broken = 1
    audit = Audit(existing, cache, "", lambda *_: None)  # type: ignore[arg-type]
    task = asyncio.create_task(audit.complete(streams))
    for kind in kinds():
        await asyncio.sleep(10)
        assert not task.done()
        await streams._answered(None, None, answered(f"{list_path(kind, '')}?watch=true"))
        await asyncio.sleep(10)
        assert not task.done()
        cache.put(kind, "a", None, None)
    await asyncio.wait_for(task, 10)
