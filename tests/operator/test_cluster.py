"""What goes over the wire to the API server, and what its answers are taken for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client

from twinpool.operator.shell.cluster import ApiRefused, Cluster, _seconds
from twinpool.operator.shell.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

POD = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "s", "namespace": "n"}}


class ApiServer:
    """Answers every request with what the test says, and keeps the requests."""

    def __init__(self) -> None:
        self.answer: tuple[int, Any] = (200, {"ok": True})
        self.pages: list[Any] = []
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        headers = {"type": request.headers.get("Content-Type", ""), "auth": request.headers.get("Authorization", "")}
        self.requests.append((request.method, request.path_qs, headers, body))
        status, answer = (200, self.pages.pop(0)) if self.pages else self.answer
        if isinstance(answer, str):
            return web.Response(status=status, text=answer)
        return web.json_response(answer, status=status)


@pytest.fixture
async def server() -> AsyncIterator[tuple[ApiServer, Cluster, Metrics]]:
    api, metrics = ApiServer(), Metrics()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", api.handle)
    async with TestServer(application) as listening:
        settings = client.Configuration(host=str(listening.make_url("")).rstrip("/"))
        settings.api_key["BearerToken"] = "bearer secret"
        cluster = Cluster(settings, metrics)
        yield api, cluster, metrics
        await cluster.close()


async def test_apply_is_server_side_forced_and_strict(server: tuple[ApiServer, Cluster, Metrics]) -> None:
    api, cluster, metrics = server
    assert await cluster.apply(POD) == {"ok": True}
    ((verb, path, headers, body),) = api.requests
    assert verb == "PATCH"
    assert path.startswith("/apis/apps/v1/namespaces/n/statefulsets/s?")
    assert {"fieldManager=twinpool/reconciler", "fieldValidation=Strict", "force=true"} <= set(
        path.partition("?")[2].replace("%2F", "/").split("&")
    )
    assert headers == {"type": "application/apply-patch+yaml", "auth": "bearer secret"}
    assert body == POD
    name, labels = "twinpool_operator_api_requests_total", {"verb": "PATCH", "code": "200"}
    assert metrics.registry.get_sample_value(name, labels) == 1


async def test_the_status_has_a_manager_of_its_own(server: tuple[ApiServer, Cluster, Metrics]) -> None:
    api, cluster, _ = server
    await cluster.apply_status("n", "p", "u", {"revision": "r"})
    ((_, path, _, body),) = api.requests
    assert path.startswith("/apis/serving.twinpool.dev/v1alpha1/namespaces/n/inferencepools/p/status?")
    assert "twinpool/status" in path.replace("%2F", "/")
    assert (body["metadata"]["uid"], body["status"]) == ("u", {"revision": "r"})


async def test_numbers_of_groups_have_a_manager_of_their_own_and_carry_what_was_observed(
    server: tuple[ApiServer, Cluster, Metrics],
) -> None:
    api, cluster, _ = server
    await cluster.apply_scaling("n", "p", "u", "7", {"target": {"prefill": 1, "decode": 2}})
    await cluster.apply_scaling("n", "p", "u", "8", None)
    (_, path, _, body), (_, _, _, empty) = api.requests
    assert "/inferencepools/p/status?" in path
    assert "twinpool/scaling" in path.replace("%2F", "/")
    assert (body["metadata"]["uid"], body["metadata"]["resourceVersion"]) == ("u", "7")
    assert body["status"] == {"scaling": {"target": {"prefill": 1, "decode": 2}}}
    assert empty["status"] == {}


async def test_a_delete_carries_what_was_observed(server: tuple[ApiServer, Cluster, Metrics]) -> None:
    api, cluster, _ = server
    await cluster.delete("Service", "n", "s", "u", "7")
    ((verb, _, _, body),) = api.requests
    assert verb == "DELETE"
    assert body["preconditions"] == {"uid": "u", "resourceVersion": "7"}


async def test_a_merge_is_not_forced(server: tuple[ApiServer, Cluster, Metrics]) -> None:
    api, cluster, _ = server
    await cluster.merge("StatefulSet", "n", "s", {"spec": {"replicas": 0}})
    ((_, path, headers, _),) = api.requests
    assert "force" not in path
    assert headers["type"] == "application/merge-patch+json"


async def test_lists_say_whether_there_is_anything(server: tuple[ApiServer, Cluster, Metrics]) -> None:
    api, cluster, _ = server
    api.answer = (200, {"items": []})
    assert not await cluster.any("InferencePool", "")
    api.answer = (200, {"items": [{}]})
    assert await cluster.any("InferencePool", "n")
    assert api.requests[1][1] == "/apis/serving.twinpool.dev/v1alpha1/namespaces/n/inferencepools?limit=1"


@pytest.mark.parametrize(
    ("status", "answer", "code", "message"),
    [
        (409, {"message": "conflict"}, 409, "conflict"),
        (503, "<html>busy</html>", 503, "<html>busy</html>"),
        (502, "", 502, "no reason was given"),
        (500, ["odd"], 500, '["odd"]'),
        (500, {"message": ".spec.x: field not declared in schema"}, 422, ".spec.x: field not declared in schema"),
    ],
)
async def test_refusals(
    server: tuple[ApiServer, Cluster, Metrics], status: int, answer: Any, code: int, message: str
) -> None:
    api, cluster, _ = server
    api.answer = (status, answer)
    with pytest.raises(ApiRefused) as caught:
        await cluster.create("Lease", "n", {"spec": {}})
    assert (caught.value.code, caught.value.message) == (code, message)
    assert str(code) in str(caught.value)


async def test_no_answer_is_counted_and_named() -> None:
    metrics = Metrics()
    cluster = Cluster(client.Configuration(host="http://127.0.0.1:1"), metrics)
    with pytest.raises(ApiRefused) as caught:
        await cluster.get("Lease", "n", "l")
    await cluster.close()
    assert caught.value.code == 0
    name, labels = "twinpool_operator_api_requests_total", {"verb": "GET", "code": "error"}
    assert metrics.registry.get_sample_value(name, labels) == 1


async def test_refused_credentials_are_read_again_once() -> None:
    api, metrics = ApiServer(), Metrics()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", api.handle)
    async with TestServer(application) as listening:
        host = str(listening.make_url("")).rstrip("/")
        reads = 0

        async def renew() -> client.Configuration:
            nonlocal reads
            reads += 1
            api.answer = (200, {"ok": True})
            return client.Configuration(host=host)

        cluster = Cluster(client.Configuration(host=host), metrics, renew)
        api.answer = (401, {"message": "Unauthorized"})
        assert await cluster.get("Lease", "n", "l") == {"ok": True}
        assert (reads, cluster.unauthorized) == (1, False)
        api.answer = (401, {"message": "Unauthorized"})
        with pytest.raises(ApiRefused):
            await cluster.get("Lease", "n", "l")
        assert (reads, cluster.unauthorized) == (1, True), "credentials that are refused for good are no storm"
        await cluster.close()


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("soon", 0.0), ("1e9", 300.0), ("-1", 0.0)])
def test_how_long_the_server_wants_to_be_left_alone(header: str, seconds: float) -> None:
    assert _seconds(header) == seconds


async def test_uids_of_all_pages(server: tuple[ApiServer, Cluster, Metrics]) -> None:
    api, cluster, _ = server
    api.pages = [
        {"metadata": {"continue": "more"}, "items": [{"metadata": {"uid": "a"}}]},
        {"metadata": {}, "items": [{"metadata": {"uid": "b"}}]},
    ]
    assert await cluster.uids("Pod", "", "app.kubernetes.io/managed-by=twinpool") == {"a", "b"}
    paths = [path for _, path, _, _ in api.requests]
    assert "labelSelector=app.kubernetes.io/managed-by%3Dtwinpool" in paths[0]
    assert "continue=more" in paths[1]
    await cluster.uids("InferencePool", "", "")
    assert "labelSelector" not in api.requests[2][1], "pools carry no label of ours"


async def test_a_json_patch_is_sent_as_one(server: tuple[ApiServer, Cluster, Metrics]) -> None:
    api, cluster, _ = server
    operations = ({"op": "test", "path": "/metadata/uid", "value": "u"}, {"op": "remove", "path": "/x"})
    await cluster.patch_exactly("Pod", "n", "p", operations)
    ((verb, path, headers, body),) = api.requests
    assert (verb, headers["type"], body) == ("PATCH", "application/json-patch+json", list(operations))
    assert path.startswith("/api/v1/namespaces/n/pods/p?")
    assert "force" not in path


async def test_a_pod_can_be_deleted_whatever_changed_of_it(server: tuple[ApiServer, Cluster, Metrics]) -> None:
    api, cluster, _ = server
    await cluster.delete("Pod", "n", "p", "u", "")
    assert api.requests[0][3]["preconditions"] == {"uid": "u"}


async def test_everything_of_a_kind_comes_page_by_page(server: tuple[ApiServer, Cluster, Metrics]) -> None:
    api, cluster, _ = server
    api.pages = [{"metadata": {"continue": "more"}, "items": [{"a": 1}]}, {"metadata": {}, "items": None}]
    assert [page async for page in cluster.pages("Node", {"fieldSelector": "x!=y"})] == [[{"a": 1}], []]
    paths = [path for _, path, _, _ in api.requests]
    assert paths[0].startswith("/api/v1/nodes?limit=500&fieldSelector=x")
    assert "continue=more" in paths[1]
