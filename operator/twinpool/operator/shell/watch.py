"""kopf as the watch engine: it lists, watches, reconnects, and fills indices. It decides and writes nothing.

Only ``@kopf.index`` and ``@kopf.on.event`` are used. They keep no state on objects: no annotation, no finalizer. An
event says only *which pool* to look at; what to do is planned from the indices.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import kopf

from twinpool.core import protocol
from twinpool.operator.logic.observed import Child, PodView, pool_key, read_child, read_pod
from twinpool.operator.shell.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PoolKey = tuple[str, str]

_POOLS = "pools"
_PODS = "pods"
#: Children that are watched: the id of the index, then group, version and plural for kopf.
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


class Cache:
    """What the watches have seen, by pool. A view of kopf's indices: reading it asks nobody."""

    def __init__(self) -> None:
        self._indices: Mapping[str, Mapping[PoolKey, Iterable[Any]]] = {}
        self._gone: set[str] = set()

    def attach(self, indices: Mapping[str, Mapping[PoolKey, Iterable[Any]]]) -> None:
        """Use kopf's indices from now on."""
        self._indices = indices

    def pools(self) -> list[PoolKey]:
        """Return the keys of all pools."""
        return list(self._indices.get(_POOLS, {}))

    def pool(self, key: PoolKey) -> dict[str, Any] | None:
        """Return a pool as the API server sent it, without managed fields, or None when there is none."""
        return next((body for body in self._of(_POOLS, key) if body["metadata"]["uid"] not in self._gone), None)

    def children(self, key: PoolKey) -> list[Child]:
        """Return the objects that belong to a pool."""
        found = (child for index, _ in _CHILDREN.values() for child in self._of(index, key))
        return [child for child in found if child.uid not in self._gone]

    def pods(self, key: PoolKey) -> tuple[PodView, ...]:
        """Return the pods of a pool."""
        return tuple(pod for pod in self._of(_PODS, key) if pod.uid not in self._gone)

    def kinds(self) -> list[str]:
        """Return the kinds that are watched."""
        return [protocol.KIND, "Pod", *_CHILDREN]

    def known(self, kind: str) -> list[tuple[PoolKey, str, str]]:
        """Return pool, name and uid of everything of a kind that is in the cache."""
        if kind == protocol.KIND:
            pools = [(key, body["metadata"]) for key in self.pools() for body in self._of(_POOLS, key)]
            found = [(key, metadata["name"], metadata["uid"]) for key, metadata in pools]
        else:
            index = _PODS if kind == "Pod" else _CHILDREN[kind][0]
            views = [(key, view) for key in list(self._indices.get(index, {})) for view in self._of(index, key)]
            found = [(key, view.name, view.uid) for key, view in views]
        return [entry for entry in found if entry[2] not in self._gone]

    def forget(self, uid: str) -> None:
        """Hide an object that no longer exists, of which no event will ever tell."""
        self._gone.add(uid)

    def _of(self, index: str, key: PoolKey) -> Iterable[Any]:
        return self._indices.get(index, {}).get(key, ())


class Patience:
    """The pauses between attempts while the API server is in trouble: growing to ten seconds, and never the last.

    kopf ends the operator when a list of pauses is used up; a restart would mend nothing.
    """

    def __iter__(self) -> Iterator[float]:
        """Start from the shortest pause."""
        yield from (1.0, 1.0, 2.0, 3.0, 5.0)
        yield from itertools.repeat(10.0)


def watch_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: post nothing, scan nothing, receive only what carries our label."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.networking.error_backoffs = Patience()
    settings.process.ultimate_exiting_timeout = 10.0
    ours = f"{protocol.LABEL_MANAGED_BY}={protocol.MANAGED_BY}"
    settings.watching.label_selectors["", "v1", "pods"] = ours
    for _, resource in _CHILDREN.values():
        settings.watching.label_selectors[resource] = ours
    # A StatefulSet's own revisions carry the labels of its pods; there is one for each group, and none is for us.
    settings.watching.label_selectors[_CHILDREN["ControllerRevision"][1]] = f"{ours},!{protocol.LABEL_GROUP}"
    return settings


#: Called for every event with the pool that it concerns and, when a group is gone, the group's name.
Seen = Callable[[PoolKey, str], None]


def watch_registry(cache: Cache, seen: Seen, streams: Streams | None = None) -> kopf.OperatorRegistry:
    """Return kopf's handlers: they fill ``cache`` and call ``seen`` for the pool that an event concerns."""
    registry = kopf.OperatorRegistry()
    _log_in(registry, streams or Streams())

    @kopf.on.startup(id="attach", registry=registry)
    async def attach(**kwargs: Any) -> None:
        names = (_POOLS, _PODS, *(index for index, _ in _CHILDREN.values()))
        cache.attach({name: kwargs[name] for name in names})

    _watch_pools(registry, seen)
    _watch_pods(registry, seen)
    for kind, (index, resource) in _CHILDREN.items():
        _watch_children(registry, seen, kind, index, resource)
    return registry


def _watch_pools(registry: kopf.OperatorRegistry, seen: Seen) -> None:
    @kopf.index(protocol.GROUP, protocol.VERSION, protocol.PLURAL, id=_POOLS, registry=registry)
    async def index(body: Mapping[str, Any], **_: Any) -> dict[PoolKey, dict[str, Any]]:
        metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
        trimmed = {"metadata": metadata, "spec": body.get("spec") or {}, "status": body.get("status") or {}}
        return {(metadata["namespace"], metadata["name"]): trimmed}

    @kopf.on.event(protocol.GROUP, protocol.VERSION, protocol.PLURAL, id="pool-event", registry=registry)
    async def event(body: Mapping[str, Any], **_: Any) -> None:
        seen((body["metadata"]["namespace"], body["metadata"]["name"]), "")


def _watch_pods(registry: kopf.OperatorRegistry, seen: Seen) -> None:
    @kopf.index("", "v1", "pods", id=_PODS, registry=registry)
    async def index(body: Mapping[str, Any], **_: Any) -> dict[PoolKey, PodView]:
        key = pool_key(body)
        return {} if key is None else {key: read_pod(body)}

    @kopf.on.event("", "v1", "pods", id="pod-event", registry=registry)
    async def event(body: Mapping[str, Any], **_: Any) -> None:
        key = pool_key(body)
        if key is not None:
            seen(key, "")


def _watch_children(
    registry: kopf.OperatorRegistry,
    seen: Seen,
    kind: str,
    index_id: str,
    resource: tuple[str, str, str],
) -> None:
    @kopf.index(*resource, id=index_id, registry=registry)
    async def index(body: Mapping[str, Any], **_: Any) -> dict[PoolKey, Child]:
        key = pool_key(body)
        return {} if key is None else {key: read_child(kind, body)}

    @kopf.on.event(*resource, id=f"{index_id}-event", registry=registry)
    async def event(type: str | None, body: Mapping[str, Any], **_: Any) -> None:  # noqa: A002 - kopf's name
        key = pool_key(body)
        if key is not None:
            gone = type == "DELETED" and kind == "StatefulSet"
            seen(key, body["metadata"]["name"] if gone else "")


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
