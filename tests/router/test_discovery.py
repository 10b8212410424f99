"""Following pods on an API server that ends watches, forgets versions, and goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from aiohttp import web
from kubernetes.aio import client

from twinpool.core import protocol
from twinpool.core.errors import InvalidValue
from twinpool.core.protocol import RouterConfig
from twinpool.router.logic.health import Probe
from twinpool.router.shell.discovery import PodWatch, configuration, follow_file
from twinpool.router.shell.probes import Prober, probe


def pod(name, role="decode", ready="True", version="1"):
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": version,
            "labels": {
                protocol.LABEL_ROLE: role,
                protocol.LABEL_POOL: "p",
                protocol.LABEL_REVISION: "r",
                protocol.LABEL_GROUP: f"group-{name}",
            },
        },
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "engine", "containerPort": 8000}]}]},
        "status": {
            "podIP": "127.0.0.9",
            "phase": "Running",
            "conditions": [{"type": "ContainersReady", "status": ready}],
        },
    }


class ApiServer:
    """Lists what it is given and streams the events that a test queues."""

    def __init__(self):
        self.pods = []
        self.lists = 0
        self.watches = []
        self.events = asyncio.Queue()
        self.fail_lists = 0
        self._runner = None
        self.port = 0

    async def start(self):
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/n/pods", self._pods)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self):
        await self._runner.cleanup()

    async def _pods(self, request):
        assert (
            request.query["labelSelector"]
            == f"{protocol.LABEL_POOL}=p,{protocol.LABEL_ROLE} in (prefill,decode,router,renderer)"
        )
        if request.query.get("watch") in ("true", "True"):
            return await self._watch(request)
        self.lists += 1
        if self.fail_lists:
            self.fail_lists -= 1
            return web.json_response({"message": "no"}, status=403)
        return web.json_response({"kind": "PodList", "metadata": {"resourceVersion": "10"}, "items": self.pods})

    async def _watch(self, request):
        self.watches.append(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        while (event := await self.events.get()) is not None:
            await response.write(json.dumps(event).encode() + b"\n")
        return response


@pytest.fixture
async def api(monkeypatch):
    monkeypatch.setattr("twinpool.router.shell.discovery._FIRST_BACKOFF", 0.01)
    server = ApiServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def follow(api):
    seen, api.copies = [], []
    settings = client.Configuration(host=f"http://127.0.0.1:{api.port}")
    watch = PodWatch(RouterConfig("p", "n", ("m",)), seen.append, api.copies.append, lambda: settings)
    task = asyncio.ensure_future(watch.run())
    yield seen
    api.events.put_nowait(None)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_pods_come_change_and_go(api, follow, kit):
    api.pods = [pod("a"), {**pod("b"), "status": {}}]
    await kit.until(lambda: follow)
    assert [(e.pod, e.wanted) for e in follow[-1]] == [("a", True)]
    put = api.events.put_nowait
    put({"type": "ADDED", "object": pod("c", "prefill", "False", "11")})
    put({"type": "MODIFIED", "object": pod("c", "prefill", "True", "12")})
    put({"type": "MODIFIED", "object": pod("c", "prefill", "True", "13")})
    await kit.until(lambda: len(follow) == 3)
    assert [(e.pod, e.role, e.wanted) for e in follow[-1]] == [("a", "decode", True), ("c", "prefill", True)]
    put({"type": "DELETED", "object": pod("a", version="14")})
    put({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": "20"}}})
    await kit.until(lambda: len(follow) == 4)
    assert [e.pod for e in follow[-1]] == ["c"]
    put(None)
    await kit.until(lambda: len(api.watches) == 2)
    assert api.watches == ["10", "20"], "a watch goes on where the last one ended"
    assert api.lists == 1


async def test_the_pools_routers_are_followed_too(api, follow, kit):
    api.pods = [pod("a"), pod("r1", "router"), pod("r2", "router")]
    await kit.until(lambda: follow and api.copies)
    assert [copy.name for copy in api.copies[-1]] == ["uid-r1", "uid-r2"]
    assert len(follow) == 1
    assert [e.pod for e in follow[-1]] == ["a"]
    api.events.put_nowait({"type": "DELETED", "object": pod("r1", "router", version="11")})
    await kit.until(lambda: len(api.copies) == 2)
    assert [copy.name for copy in api.copies[-1]] == ["uid-r2"]
    assert len(follow) == 1  # no worker came or went


async def test_a_mark_on_any_rank_takes_the_whole_group_out_of_service(api, follow, kit):
    follower = pod("b", version="2")
    follower["metadata"]["labels"] |= {protocol.LABEL_POD_INDEX: "1", protocol.LABEL_GROUP: "group-a"}
    api.pods = [pod("a"), follower, pod("c")]
    await kit.until(lambda: follow)
    assert [(e.pod, e.wanted) for e in follow[-1]] == [("a", True), ("c", True)]
    follower["metadata"]["annotations"] = {protocol.ANNOTATION_DRAINING: "2026-01-01T00:00:00Z"}
    api.events.put_nowait({"type": "MODIFIED", "object": follower})
    await kit.until(lambda: len(follow) == 2)
    assert [(e.pod, e.wanted, e.draining) for e in follow[-1]] == [("a", False, True), ("c", True, False)]


async def test_a_forgotten_version_means_a_new_list(api, follow, kit):
    api.pods = [pod("a")]
    await kit.until(lambda: api.watches)
    api.pods = [pod("b")]
    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
    api.events.put_nowait({"type": "ERROR", "object": status})
    await kit.until(lambda: follow and [e.pod for e in follow[-1]] == ["b"])


async def test_an_api_server_that_refuses_or_is_away_costs_no_endpoint(api, follow, kit, caplog):
    api.pods = [pod("a")]
    await kit.until(lambda: api.watches)
    await api.stop()
    api.fail_lists = 1
    api.events = asyncio.Queue()
    await kit.until(lambda: "is away" in caplog.text)
    assert [e.pod for e in follow[-1]] == ["a"]
    api.pods = [pod("a"), pod("b")]
    await api.start()
    await kit.until(lambda: [e.pod for e in follow[-1]] == ["a", "b"])
    assert "refused to list or watch pods: 403" in caplog.text


async def test_an_event_that_nobody_expected_ends_nothing(api, follow, kit, caplog):
    api.pods = [pod("a")]
    await kit.until(lambda: api.watches)
    api.pods = [pod("a"), pod("b")]
    api.events.put_nowait({"type": "ADDED", "object": {"metadata": {"resourceVersion": "1"}}})
    await kit.until(lambda: [e.pod for e in follow[-1]] == ["a", "b"])
    assert "the last known workers stay" in caplog.text


def test_outside_a_pod_the_user_is_told_what_to_do(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InvalidValue, match="--endpoints"):
        configuration()


async def test_a_list_in_a_file_is_read_again_when_it_changes(tmp_path, kit, caplog):
    path = tmp_path / "workers.json"
    path.write_text('[{"role": "decode", "host": "h"}]')
    seen = []
    task = asyncio.ensure_future(follow_file(path, seen.append, 0.01))
    await kit.until(lambda: seen)
    path.write_text("oops, no JSON")
    await kit.until(lambda: "is not JSON" in caplog.text)
    path.unlink()
    path.write_text('[{"role": "decode", "host": "h"}, {"role": "prefill", "host": "h2"}]')
    await kit.until(lambda: len(seen) == 2)
    assert [e.id for e in seen[-1]] == ["h:8000", "h2:8000"]
    task.cancel()


async def test_a_file_that_is_wrong_from_the_start_is_an_error(tmp_path):
    with pytest.raises(InvalidValue, match="cannot be read"):
        await follow_file(tmp_path / "none", lambda _: None)
    (tmp_path / "bad").write_text("{}")
    with pytest.raises(InvalidValue, match="JSON list"):
        await follow_file(tmp_path / "bad", lambda _: None)


async def test_probes(make_router, kit):
    router = await make_router()
    engine = await router.engine("decode")
    assert await probe(engine.endpoint()) is Probe.OK
    engine.script = kit.always(kit.response(b"", "503 X"))
    assert await probe(engine.endpoint()) is Probe.FAILED
    engine.script = kit.reset
    assert await probe(engine.endpoint()) is Probe.FAILED
    await engine.stop()
    assert await probe(engine.endpoint()) is Probe.FAILED


async def test_a_probe_without_an_answer_says_nothing(make_router, kit, monkeypatch):
    monkeypatch.setattr("twinpool.router.shell.probes._TIMEOUT", 0.05)
    router = await make_router()
    engine = await router.engine("decode", kit.hang)
    assert await probe(engine.endpoint()) is Probe.LATE


async def test_an_engine_that_begins_to_answer_is_asked_for_its_room(make_router, kit, monkeypatch):
    monkeypatch.setattr("twinpool.router.logic.health.SLOW_SECONDS", 0.01)
    monkeypatch.setattr("twinpool.router.shell.probes._TIMEOUT", 0.5)
    router = await make_router()
    engine = await router.engine("decode")
    info = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'
    engine.script = kit.always(kit.response(info))
    known = []
    prober = Prober(lambda: known.append(prober.kv_tokens("decode-0")))
    prober.watch([engine.endpoint()])
    await kit.until(lambda: known == [0, 16000])
    prober.watch([])
    assert prober.kv_tokens("decode-0") == 0
    # One that does not say it is asked three times, and admitted all the same.
    engine.script = kit.always(kit.response(b"vllm:num_requests_running 0.0\n"))
    engine.requests.clear()
    prober.watch([engine.endpoint()])
    await kit.until(lambda: len(engine.requests) >= 8)
    assert sum(request.target == "/metrics" for request in engine.requests) == 3
    assert prober.admitted("decode-0")
    assert known == [0, 16000, 0]
    prober.close()


async def test_the_prober_admits_and_takes_out(make_router, kit):
    router = await make_router()
    engine = await router.engine("decode")
    changes = []
    prober = Prober(lambda: changes.append(prober.admitted("decode-0")))
    prober.watch([engine.endpoint()])
    await kit.until(lambda: changes == [True])
    prober.watch([])
    assert not prober.admitted("decode-0")
    await engine.stop()
    prober.watch([engine.endpoint()])
    await asyncio.sleep(0.05)
    assert not prober.admitted("decode-0")
    await engine.start()
    await kit.until(lambda: changes == [True, True])
    prober.close()
