"""Where the list of endpoints comes from: the pods of a namespace, or a file.

Always true: the last known list stays when its source is away; an API server that restarts stops no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import aiohttp
from kubernetes.aio import client, config, watch

from twinpool.core import protocol
from twinpool.core.errors import InvalidValue
from twinpool.router.logic.copies import Copy, copy_of_pod
from twinpool.router.logic.endpoints import (
    Endpoint,
    WorkerPod,
    endpoints_of_file,
    endpoints_of_workers,
    worker_of_pod,
)

if TYPE_CHECKING:
    from pathlib import Path

    from twinpool.core.protocol import RouterConfig

log = logging.getLogger(__name__)

#: Called with every new list; the first call means that discovery has synced.
Listener = Callable[[tuple[Endpoint, ...]], None]

#: Called with every new list of the pool's routers, this one included.
CopiesListener = Callable[[tuple[Copy, ...]], None]

_WATCH_SECONDS = 300
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.5, 15.0
_GONE = 410


async def follow_file(path: Path, listener: Listener, interval: float = 1.0) -> None:
    """Read a static list of endpoints, again whenever the file changes.

    Raises
    ------
    InvalidValue
        When the file cannot be read the first time; a later mistake keeps the last good list and is logged.
    """
    seen: tuple[int, int] | None = None
    while True:
        with contextlib.suppress(OSError):
            if seen is None or _stamp(path) != seen:
                stamp = _stamp(path)
                try:
                    listener(_read_file(path))
                except InvalidValue as error:
                    if seen is None:
                        raise
                    log.warning("keeping the endpoints: %s", error)
                seen = stamp
        if seen is None:
            raise InvalidValue(f"the endpoint list {path} cannot be read", "create it, or leave --endpoints away")
        await asyncio.sleep(interval)


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _read_file(path: Path) -> tuple[Endpoint, ...]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidValue(f"{path} is not JSON: {error}", "write a list of objects with role, host and port") from None
    return endpoints_of_file(document, str(path))


class PodWatch:
    """Lists and watches the pods of one pool: its workers, and its routers."""

    def __init__(
        self,
        settings: RouterConfig,
        listener: Listener,
        copies: CopiesListener,
        configure: Callable[[], Any] | None = None,
    ) -> None:
        self._configure = configure or configuration
        self._namespace = settings.namespace
        self._selector = (
            f"{protocol.LABEL_POOL}={settings.pool},{protocol.LABEL_ROLE} in (prefill,decode,router,renderer)"
        )
        self._listener = listener
        self._copies_listener = copies
        self._pods: dict[str, WorkerPod] = {}
        self._copies: dict[str, Copy] = {}
        self._published: tuple[Endpoint, ...] | None = None
        self._published_copies: tuple[Copy, ...] = ()

    async def run(self) -> None:
        """Follow the pods for ever; errors of the API server are logged and tried again."""
        backoff = _FIRST_BACKOFF
        async with client.ApiClient(self._configure()) as api:
            pods = client.CoreV1Api(api)
            while True:
                try:
                    version = await self._list(pods)
                    backoff = _FIRST_BACKOFF
                    await self._watch(pods, version)
                except client.ApiException as error:
                    if error.status == _GONE:
                        continue
                    log.warning("the API server refused to list or watch pods: %s %s", error.status, error.reason)
                except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
                    log.warning("the API server is away, the last known workers stay: %s", error)
                except Exception:
                    # A surprise in one event must not end a router that serves.
                    log.exception("following the pods failed, the last known workers stay")
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _LONGEST_BACKOFF)

    async def _list(self, pods: Any) -> str:
        response = await pods.list_namespaced_pod_without_preload_content(
            self._namespace, label_selector=self._selector, _request_timeout=30
        )
        document = json.loads(await response.read())
        if response.status != 200:
            raise client.ApiException(status=response.status, reason=document.get("message"))
        self._pods, self._copies = {}, {}
        for pod in document["items"]:
            self._take(pod)
        self._publish()
        return str(document["metadata"]["resourceVersion"])

    async def _watch(self, pods: Any, version: str) -> None:
        """Apply changes until the API server ends the watch; then watch on from where it ended."""
        while True:
            stream = watch.Watch(return_type="object")
            async with stream:
                events = stream.stream(
                    pods.list_namespaced_pod,
                    self._namespace,
                    label_selector=self._selector,
                    resource_version=version,
                    allow_watch_bookmarks=True,
                    timeout_seconds=_WATCH_SECONDS,
                    _request_timeout=_WATCH_SECONDS + 30,
                )
                async for event in events:
                    self._apply(event["type"], event["raw_object"])
                version = stream.resource_version or version

    def _apply(self, kind: str, pod: dict[str, Any]) -> None:
        if kind == "BOOKMARK":
            return
        self._take(pod, gone=kind == "DELETED")
        self._publish()

    def _take(self, pod: dict[str, Any], *, gone: bool = False) -> None:
        uid = pod["metadata"]["uid"]
        copy = None if gone else copy_of_pod(pod, protocol.ROUTER_ADMIN_PORT)
        worker = None if gone else worker_of_pod(pod)
        if copy is not None:
            self._copies[uid] = copy
        else:
            self._copies.pop(uid, None)
        if worker is not None:
            self._pods[uid] = worker
        else:
            self._pods.pop(uid, None)

    def _publish(self) -> None:
        copies = tuple(self._copies.values())
        if copies != self._published_copies:
            self._published_copies = copies
            self._copies_listener(copies)
        endpoints = endpoints_of_workers(self._pods.values())
        if endpoints != self._published:
            self._published = endpoints
            self._listener(endpoints)


def configuration() -> Any:
    """Return how to reach the API server from inside a pod; the token is read again as it is renewed."""
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
    except config.ConfigException as error:
        raise InvalidValue(
            f"the router is not in a Kubernetes pod: {error}",
            "run it as the operator does, or list the workers in a file and give it as --endpoints",
        ) from None
    return settings
