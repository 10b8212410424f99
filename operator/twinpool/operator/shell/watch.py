"""kopf as the watch engine: it lists, watches and reconnects. It decides and writes nothing.

Only ``@kopf.on.event`` is used. It keeps no state on objects: no annotation, no finalizer. An event fills the cache and
says *which pool* to look at; what to do is planned from the cache.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import kopf

from twinpool.core import protocol
from twinpool.operator.logic import compute_domain
from twinpool.operator.logic.observed import pool_key, read_child, read_pod
from twinpool.operator.shell.cache import POD, Cache, PoolKey
from twinpool.operator.shell.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["Cache", "PoolKey", "Seen", "kinds", "selector", "watch_registry", "watch_settings"]

#: Children that are watched: the id of the handler, then group, version and plural for kopf.
_CHILDREN: Mapping[str, tuple[str, tuple[str, str, str]]] = {
    "StatefulSet": ("statefulsets", ("apps", "v1", "statefulsets")),
    "Deployment": ("deployments", ("apps", "v1", "deployments")),
    "ControllerRevision": ("revisions", ("apps", "v1", "controllerrevisions")),
    "Service": ("services", ("", "v1", "services")),
    "ServiceAccount": ("serviceaccounts", ("", "v1", "serviceaccounts")),
    "PodDisruptionBudget": ("poddisruptionbudgets", ("policy", "v1", "poddisruptionbudgets")),
    "Role": ("roles", ("rbac.authorization.k8s.io", "v1", "roles")),
    "RoleBinding": ("rolebindings", ("rbac.authorization.k8s.io", "v1", "rolebindings")),
}
#: Children that are watched where the cluster serves their kind.
_OPTIONAL: Mapping[str, tuple[str, tuple[str, str, str]]] = {
    compute_domain.KIND: ("computedomains", ("resource.nvidia.com", "v1beta1", "computedomains")),
}


class NothingKept(kopf.DiffBaseStorage):
    """kopf copies every object several times to see what changed since it last noted it down. We note nothing."""

    def build(self, **_: Any) -> Any:
        """Return that nothing of an object matters."""
        return {}

    def fetch(self, **_: Any) -> None:
        """Return that nothing was noted."""

    def store(self, **_: Any) -> None:
        """Note nothing."""


class Patience:
    """The pauses between attempts while the API server is in trouble: growing to ten seconds, and never the last.

    kopf ends the operator when a list of pauses is used up; a restart would mend nothing.
    """

    def __iter__(self) -> Iterator[float]:
        """Start from the shortest pause."""
        yield from (1.0, 1.0, 2.0, 3.0, 5.0)
        yield from itertools.repeat(10.0)


def kinds(served: Collection[str] = ()) -> list[str]:
    """Return the kinds that are watched; ``served`` are those that not every cluster serves and this one does."""
    return [protocol.KIND, POD, *_children(served)]


def _children(served: Collection[str]) -> dict[str, tuple[str, tuple[str, str, str]]]:
    return {**_CHILDREN, **{kind: found for kind, found in _OPTIONAL.items() if kind in served}}


def selector(kind: str) -> str:
    """Return the label selector of a kind's watch; pools carry no label of ours."""
    if kind == protocol.KIND:
        return ""
    ours = f"{protocol.LABEL_MANAGED_BY}={protocol.MANAGED_BY}"
    # A StatefulSet's own revisions carry the labels of its pods; there is one for each group, and none is for us.
    return f"{ours},!{protocol.LABEL_GROUP}" if kind == "ControllerRevision" else ours


#: Objects that one answer of a list holds, and seconds for which kopf keeps the last event of an object. Both bound how
#: many whole objects are in memory at once, of which the caches keep a small part: starting with 500 pools and
#: 5,000 pods took 700 MiB without, which the process then kept, and 230 MiB with (``make bench NAME=operator``).
LIST_CHUNK = 250
IDLE_TIMEOUT = 0.1


def watch_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: post nothing, scan nothing, receive only what carries our label."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.networking.error_backoffs = Patience()
    settings.persistence.diffbase_storage = NothingKept()
    settings.process.ultimate_exiting_timeout = 10.0
    settings.watching.chunk_size = LIST_CHUNK
    settings.queueing.idle_timeout = IDLE_TIMEOUT
    settings.watching.label_selectors["", "v1", "pods"] = selector(POD)
    for kind, (_, resource) in {**_CHILDREN, **_OPTIONAL}.items():
        settings.watching.label_selectors[resource] = selector(kind)
    return settings


#: Called for every event with the pool that it concerns and, when a group is gone, the group's name.
Seen = Callable[[PoolKey, str], None]


def watch_registry(
    cache: Cache, seen: Seen, streams: Streams | None = None, served: Collection[str] = ()
) -> kopf.OperatorRegistry:
    """Return kopf's handlers: they fill ``cache`` and call ``seen`` for the pool that an event concerns."""
    registry = kopf.OperatorRegistry()
    _log_in(registry, streams or Streams())

    _watch_pools(registry, cache, seen)
    _watch_pods(registry, cache, seen)
    for kind, (handler, resource) in _children(served).items():
        _watch_children(registry, cache, seen, kind, handler, resource)
    return registry


def _watch_pools(registry: kopf.OperatorRegistry, cache: Cache, seen: Seen) -> None:
    @kopf.on.event(protocol.GROUP, protocol.VERSION, protocol.PLURAL, id="pools", registry=registry)
    async def event(event: Mapping[str, Any], **_: Any) -> None:
        body = event["object"]
        metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
        key, uid = (metadata["namespace"], metadata["name"]), metadata["uid"]
        if event["type"] == "DELETED":
            cache.remove(protocol.KIND, uid)
        else:
            trimmed = {"metadata": metadata, "spec": body.get("spec") or {}, "status": body.get("status") or {}}
            cache.put(protocol.KIND, uid, key, trimmed)
        seen(key, "")


def _watch_pods(registry: kopf.OperatorRegistry, cache: Cache, seen: Seen) -> None:
    @kopf.on.event("", "v1", "pods", id="pods", registry=registry)
    async def event(event: Mapping[str, Any], **_: Any) -> None:
        body, key = event["object"], pool_key(event["object"])
        uid = body["metadata"]["uid"]
        if event["type"] == "DELETED":
            cache.remove(POD, uid)
        else:
            cache.put(POD, uid, key, None if key is None else read_pod(body))
        if key is not None:
            seen(key, "")


def _watch_children(
    registry: kopf.OperatorRegistry,
    cache: Cache,
    seen: Seen,
    kind: str,
    handler: str,
    resource: tuple[str, str, str],
) -> None:
    @kopf.on.event(*resource, id=handler, registry=registry)
    async def event(event: Mapping[str, Any], **_: Any) -> None:
        body, key = event["object"], pool_key(event["object"])
        gone = event["type"] == "DELETED"
        if gone:
            cache.remove(kind, body["metadata"]["uid"])
        else:
            cache.put(kind, body["metadata"]["uid"], key, None if key is None else read_child(kind, body))
        if key is not None:
            seen(key, body["metadata"]["name"] if gone and kind == "StatefulSet" else "")


#: Seconds between two logins: credentials that are refused for good must not become a storm.
LOGIN_PAUSE = 5.0


def _log_in(registry: kopf.OperatorRegistry, streams: Streams) -> None:
    last = float("-inf")

    @kopf.on.login(id="login", registry=registry)
    async def login(**kwargs: Any) -> kopf.AiohttpSession | None:
        """Log in as :func:`twinpool.operator.shell.cluster.configuration` does; called again after a 401."""
        nonlocal last
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, last + LOGIN_PAUSE - loop.time()))
        last = loop.time()
        found = _credentials(**kwargs)
        return None if found is None else streams.session(found)


def _credentials(**kwargs: Any) -> kopf.ConnectionInfo | None:
    in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
    if not in_cluster:
        return kopf.login_with_kubeconfig(**kwargs)
    login = kopf.login_with_service_account(**kwargs)
    if login is None:
        return None
    # kopf says kubernetes.default.svc, which needs cluster DNS; every pod is told the address.
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return dataclasses.replace(login, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")
