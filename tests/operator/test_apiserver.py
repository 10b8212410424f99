"""The whole operator against an API server that is away, overloaded, forgetful, or that changes its mind about us."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from twinpool.core import protocol
from twinpool.operator.logic.merge import merge
from twinpool.operator.shell.watch import _CHILDREN, LIST_CHUNK

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

Body = dict[str, Any]

#: What kopf looks for besides what the operator watches.
GROUPS = {
    "v1": {"pods", "namespaces", "events"},
    "apiextensions.k8s.io/v1": {"customresourcedefinitions"},
    protocol.API_VERSION: {protocol.PLURAL},
}
for _, (_group, _version, _plural) in _CHILDREN.values():
    GROUPS.setdefault(f"{_group}/{_version}" if _group else _version, set()).add(_plural)
KINDS = {"statefulsets": "StatefulSet", "services": "Service", protocol.PLURAL: protocol.KIND}
OBJECT = re.compile(
    r"/(?:api|apis/[^/]+)/v\w+(?:/namespaces/(?P<ns>[^/]+))?/(?P<plural>[a-z]+)(?:/(?P<name>[^/]+))?(?:/status)?"
)
POOL = {
    "apiVersion": protocol.API_VERSION,
    "kind": protocol.KIND,
    "metadata": {"name": "demo", "namespace": "team"},
    "spec": {"model": {"name": "m"}, "decode": {"replicas": 1, "resources": {"gpu": {"perNode": 0}}}},
}


class FakeApi:
    """Objects, watches and the preconditions of writes, as the API server has them; and its bad days."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Body] = {}
        self.requests: list[tuple[float, str, str, int]] = []
        self.trouble: Callable[[web.Request], Awaitable[web.Response | None]] | None = None
        self.token = "first"
        self.denied: set[tuple[str, str]] = set()
        self.schema: Body | None = None
        self._watchers: dict[asyncio.Queue[Body | None], str] = {}
        self._version = 1

    def put(self, body: Body, plural: str) -> Body:
        """Store an object and tell the watches."""
        self._version += 1
        metadata = body["metadata"]
        place = (plural, metadata["namespace"], metadata["name"])
        known = place in self.objects
        metadata["resourceVersion"] = str(self._version)
        metadata.setdefault("uid", f"uid-{self._version}")
        metadata["generation"] = metadata.get("generation", 0) + 1
        self.objects[place] = body
        self._tell(plural, {"type": "MODIFIED" if known else "ADDED", "object": copy.deepcopy(body)})
        return body

    def remove(self, plural: str, name: str, tell: bool = True) -> None:
        """Delete an object; watches that are away hear nothing."""
        body = self.objects.pop((plural, "team", name))
        self._version += 1
        if tell:
            body["metadata"]["resourceVersion"] = str(self._version)
            self._tell(plural, {"type": "DELETED", "object": body})

    def end_watches(self, gone: bool) -> None:
        """End all watches; ``gone`` says that they must list anew."""
        status = {"kind": "Status", "code": 410, "reason": "Expired"}
        for queue in self._watchers:
            if gone:
                queue.put_nowait({"type": "ERROR", "object": status})
            queue.put_nowait(None)

    def names(self, plural: str) -> set[str]:
        return {name for kind, _, name in self.objects if kind == plural}

    def count(self, verb: str, code: int | None = None) -> int:
        leases = "/apis/coordination"
        return sum(v == verb and code in (None, c) and not p.startswith(leases) for _, v, p, c in self.requests)

    def _tell(self, plural: str, event: Body) -> None:
        for queue, watched in self._watchers.items():
            if watched == plural:
                queue.put_nowait(event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        response = await self._answer(request)
        self.requests.append((asyncio.get_running_loop().time(), request.method, request.path, response.status))
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization", "").lower() != f"bearer {self.token}":
            return _status(401, "Unauthorized")
        trouble = await self.trouble(request) if self.trouble else None
        if trouble is not None:
            return trouble
        match = OBJECT.fullmatch(request.path)
        if request.path.endswith("/selfsubjectaccessreviews"):
            asked = (await request.json())["spec"]["resourceAttributes"]
            return web.json_response({"status": {"allowed": (asked["verb"], asked["resource"]) not in self.denied}})
        if request.path.startswith("/openapi") and self.schema:
            return web.json_response(self.schema)
        if match is None:
            return self._discovery(request.path)
        if match["name"] is None and request.query.get("watch") == "true":
            return await self._watch(request, match["plural"])
        return await self._object(request, match["plural"], match["ns"], match["name"])

    def _discovery(self, path: str) -> web.Response:
        if path == "/api":
            return web.json_response({"versions": ["v1"]})
        if path == "/apis":
            names = [name for name in GROUPS if "/" in name]
            versions = [{"groupVersion": name, "version": name.split("/")[1]} for name in names]
            groups = [
                {"name": v["groupVersion"].split("/")[0], "versions": [v], "preferredVersion": v} for v in versions
            ]
            return web.json_response({"groups": groups})
        found = GROUPS.get(path.removeprefix("/apis/").removeprefix("/api/"))
        verbs = ["get", "list", "watch", "patch", "create", "delete"]
        entry = {"namespaced": True, "verbs": verbs, "singularName": ""}
        if found is None:
            return _status(404, "not found")
        return web.json_response(
            {"resources": [{"name": name, "kind": KINDS.get(name, name), **entry} for name in found]}
        )

    async def _watch(self, request: web.Request, plural: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[Body | None] = asyncio.Queue()
        self._watchers[queue] = plural
        try:
            while (event := await queue.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            del self._watchers[queue]
        return response

    def _list(self, request: web.Request, plural: str) -> web.Response:
        items = [body for (kind, _, _), body in self.objects.items() if kind == plural]
        start, limit = int(request.query.get("continue") or 0), int(request.query.get("limit") or len(items))
        more = str(start + limit) if len(items) > start + limit else ""
        metadata = {"resourceVersion": str(self._version), "continue": more}
        return web.json_response({"metadata": metadata, "items": items[start : start + limit]})

    async def _object(self, request: web.Request, plural: str, namespace: str, name: str | None) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        if name is None and request.method == "GET":
            return self._list(request, plural)
        known = self.objects.get((plural, namespace, name or body["metadata"]["name"]))
        if request.method == "POST":
            return _status(409, "exists") if known else web.json_response(self.put(body, plural), status=201)
        if known is None and (request.method != "PATCH" or body["metadata"].get("uid")):
            return _status(404 if request.method != "PATCH" else 409, "not found")
        if request.method == "GET":
            return web.json_response(known)
        exact = body.get("preconditions") or body["metadata"]
        if known and any(
            exact.get(key, known["metadata"][key]) != known["metadata"][key] for key in ("uid", "resourceVersion")
        ):
            return _status(409, "conflict")
        if request.method == "DELETE":
            self.remove(plural, str(name))
            return web.json_response({})
        if request.path.endswith("/status"):
            body = {"status": body["status"]}
        merged = merge(copy.deepcopy(known or {}), body)
        merged["metadata"].setdefault("namespace", namespace)
        return web.json_response(self.put(merged, plural))


def _status(code: int, message: str, **headers: str) -> web.Response:
    return web.json_response({"kind": "Status", "message": message, "code": code}, status=code, headers=headers)


class Running:
    """An operator as a process of its own, and what it says about itself."""

    def __init__(self, api: FakeApi, process: asyncio.subprocess.Process, port: int, kubeconfig: Any) -> None:
        self.api, self.process, self._port, self.kubeconfig = api, process, port, kubeconfig

    async def get(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self._port}{path}") as answer:
            return answer.status, await answer.text()

    async def until(self, condition: Callable[[], Any], seconds: float = 30.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                assert self.process.returncode is None, "the operator ended"
                await asyncio.sleep(0.02)

    async def until_says(self, words: str, path: str = "/readyz") -> str:
        async with asyncio.timeout(30.0):
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    text = (await self.get(path))[1]
                    if words in text:
                        return text
                await asyncio.sleep(0.05)

    def settled(self, beside: int = 0) -> bool:
        return len(self.api.names("statefulsets")) == 1 and len(self.api.objects) >= 9 + beside


def write_kubeconfig(path: Any, server: str, token: str) -> None:
    body = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": token}}],
    }
    path.write_text(yaml.safe_dump(body))


@pytest.fixture
async def running(tmp_path: Any, unused_tcp_port: int) -> AsyncIterator[Any]:
    """Start the operator against a fake API server; it is stopped afterwards."""
    started: list[asyncio.subprocess.Process] = []
    servers: list[TestServer] = []

    async def start(api: FakeApi) -> Running:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", api.handle)
        servers.append(TestServer(application))
        await servers[-1].start_server()
        kubeconfig = tmp_path / "kubeconfig"
        write_kubeconfig(kubeconfig, str(servers[-1].make_url("")).rstrip("/"), "first")
        options = ["--host=127.0.0.1", f"--port={unused_tcp_port}", "--namespace=team"]
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        command = (sys.executable, "-m", "twinpool.operator", *options)
        started.append(await asyncio.create_subprocess_exec(*command, env=environment))
        return Running(api, started[-1], unused_tcp_port, kubeconfig)

    yield start
    for process in started:
        if process.returncode is None:
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 20) == 0, "it ends when it is asked to, whatever happened"
    for server in servers:
        await server.close()


@pytest.fixture
def api() -> FakeApi:
    made = FakeApi()
    made.put(copy.deepcopy(POOL), protocol.PLURAL)
    return made


async def test_a_pool_is_planned_and_the_plans_are_shown(api: FakeApi, running: Any) -> None:
    operator = await running(api)
    await operator.until(operator.settled)
    assert await operator.until_says("ok") == "ok\n"
    status, text = await operator.get("/debug/pools/team/demo")
    (*_, first) = json.loads(text)
    assert status == 200
    assert "apply StatefulSet demo-decode-" in " ".join(first["actions"])
    assert first["result"] == "done"
    assert (await operator.get("/debug/pools/team/other"))[0] == 404
    assert json.loads((await operator.get("/debug/pools"))[1]) == ["team/demo"]
    metrics = (await operator.get("/metrics"))[1]
    assert 'twinpool_operator_actions_total{action="apply",kind="StatefulSet",result="done"} 1.0' in metrics


async def test_what_went_while_a_watch_was_away_is_noticed(api: FakeApi, running: Any) -> None:
    operator = await running(api)
    await operator.until(operator.settled)
    (group,) = api.names("statefulsets")
    api.remove("statefulsets", group, tell=False)
    api.remove("services", "demo-router", tell=False)
    api.end_watches(gone=True)
    await operator.until(lambda: operator.settled() and "demo-router" in api.names("services"))
    assert group not in api.names("statefulsets"), "a group's name is never used again"


async def test_a_pool_that_went_while_its_watch_was_away_is_left_alone(api: FakeApi, running: Any) -> None:
    operator = await running(api)
    await operator.until(operator.settled)
    api.remove(protocol.PLURAL, "demo", tell=False)
    api.end_watches(gone=True)
    await operator.until_says("[]", "/debug/pools")
    before = api.count("PATCH")
    api.remove("services", "demo-router")
    await asyncio.sleep(0.5)
    assert api.count("PATCH") == before


@pytest.mark.parametrize("code", [503, 403])
async def test_an_api_server_in_trouble_is_waited_for(api: FakeApi, running: Any, code: int) -> None:
    operator = await running(api)
    await operator.until(operator.settled)

    async def trouble(_: web.Request) -> web.Response:
        return _status(code, "trouble")

    api.trouble = trouble
    api.end_watches(gone=True)
    api.remove("services", "demo-router", tell=False)
    await asyncio.sleep(2.5)
    before = len(api.requests)
    assert before < 200, "no storm"
    api.trouble = None
    await operator.until(lambda: "demo-router" in api.names("services"))
    assert (await operator.get("/healthz"))[0] == 200


async def test_retry_after_is_obeyed(api: FakeApi, running: Any) -> None:
    async def trouble(request: web.Request) -> web.Response | None:
        refused = api.count("PATCH", 429)
        if request.method == "PATCH" and refused < 1:
            return _status(429, "slow down", **{"Retry-After": "2"})
        return None

    api.trouble = trouble
    operator = await running(api)
    await operator.until(operator.settled)
    times = [(time, code) for time, verb, path, code in api.requests if verb == "PATCH" and "lease" not in path]
    refused = next(time for time, code in times if code == 429)
    assert min(time for time, code in times if code == 200) >= refused + 1.9


async def test_conflicts_make_no_hot_loop(api: FakeApi, running: Any) -> None:
    async def trouble(request: web.Request) -> web.Response | None:
        return _status(409, "conflict") if request.method == "PATCH" else None

    api.trouble = trouble
    operator = await running(api)
    await operator.until(lambda: api.count("PATCH"))
    await asyncio.sleep(2)
    assert api.count("PATCH") < 30


async def test_a_replaced_token_is_read_again(api: FakeApi, running: Any) -> None:
    operator = await running(api)
    await operator.until(operator.settled)
    server = yaml.safe_load(operator.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
    api.token = "second"
    api.end_watches(gone=False)
    await operator.until_says("credentials")
    write_kubeconfig(operator.kubeconfig, server, "second")
    await operator.until_says("ok")
    api.remove("services", "demo-router")
    await operator.until(lambda: "demo-router" in api.names("services"))
    assert api.count("GET", 401) < 100, "no storm of logins"


async def test_missing_rights_are_named_and_waited_for(api: FakeApi, running: Any) -> None:
    api.denied = {("patch", "statefulsets"), ("watch", "pods")}
    operator = await running(api)
    text = await operator.until_says("statefulsets.apps: patch")
    assert "pods: watch" in text
    assert "deploy/operator.yaml" in text
    assert not api.count("PATCH")
    api.denied = set()
    await operator.until(operator.settled)
    await operator.until_says("ok")


async def test_a_crd_that_is_older_is_named_and_waited_for(api: FakeApi, running: Any) -> None:
    kinds = [{"group": protocol.GROUP, "kind": protocol.KIND, "version": protocol.VERSION}]
    properties = {"spec": {"properties": {}}, "status": {"properties": {"revision": {}}}}
    schema = {"x-kubernetes-group-version-kind": kinds, "properties": properties}
    api.schema = {"components": {"schemas": {"x": {}, "pool": schema}}}
    operator = await running(api)
    text = await operator.until_says("older than this operator")
    assert "status.conditions" in text
    assert not api.count("PATCH")
    api.schema = None
    await operator.until(operator.settled)


async def test_nothing_is_planned_before_every_kind_was_listed(api: FakeApi, running: Any) -> None:
    listing = asyncio.Event()

    async def slow(request: web.Request) -> None:
        if request.path.endswith("/statefulsets") and request.query.get("watch") is None:
            await listing.wait()

    api.trouble = slow  # type: ignore[assignment]
    operator = await running(api)
    await operator.until(lambda: any(verb == "PUT" for _, verb, _, _ in api.requests))
    await asyncio.sleep(0.5)
    assert not api.count("PATCH"), "an operator that sees half would make the other half again"
    await operator.until_says("caches")
    listing.set()
    await operator.until(operator.settled)


async def test_a_spec_of_300_kb_is_served_and_nothing_is_kept_on_the_pool(api: FakeApi, running: Any) -> None:
    large = copy.deepcopy(POOL)
    env = [{"name": f"V{number}", "value": "x" * 1000} for number in range(300)]
    large["spec"]["decode"]["podTemplate"] = {"spec": {"containers": [{"name": "engine", "env": env}]}}
    api.put(large, protocol.PLURAL)
    operator = await running(api)
    await operator.until(operator.settled)
    await operator.until(lambda: "status" in api.objects[protocol.PLURAL, "team", "demo"])
    stored = api.objects[protocol.PLURAL, "team", "demo"]
    assert not {"annotations", "finalizers", "labels"} & set(stored["metadata"])
    written = {path for _, verb, path, _ in api.requests if verb == "PATCH" and protocol.PLURAL in path}
    assert all(path.endswith("/status") for path in written), "nothing but the status is written to the pool"


async def test_a_start_with_many_objects_blocks_nothing(api: FakeApi, running: Any) -> None:
    labels = {protocol.LABEL_MANAGED_BY: protocol.MANAGED_BY, protocol.LABEL_POOL: "other"}
    for number in range(600):
        api.put({"metadata": {"name": f"pod-{number}", "namespace": "team", "labels": labels}}, "pods")
    operator = await running(api)
    await operator.until(lambda: operator.settled(600))


async def test_a_list_that_takes_too_long_is_begun_anew(api: FakeApi, running: Any) -> None:
    """The API server forgets what a list goes on from after some minutes: 410 on its next chunk."""
    labels = {protocol.LABEL_MANAGED_BY: protocol.MANAGED_BY, protocol.LABEL_POOL: "other"}
    for number in range(2 * LIST_CHUNK):
        api.put({"metadata": {"name": f"pod-{number}", "namespace": "team", "labels": labels}}, "pods")
    refused = 0

    async def forgetful(request: web.Request) -> web.Response | None:
        nonlocal refused
        ours = "PartialObjectMetadata" in request.headers.get("Accept", "")
        if not request.path.endswith("/pods") or not request.query.get("continue") or ours or refused == 2:
            return None
        refused += 1
        return _status(410, "The provided continue parameter is too old")

    api.trouble = forgetful
    operator = await running(api)
    await operator.until(lambda: operator.settled(2 * LIST_CHUNK))
    assert refused == 2
