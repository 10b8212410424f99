"""kopf as the watch engine: it lists, watches, reconnects, and fills indices. It decides and writes nothing.

Only ``@kopf.index`` and ``@kopf.on.event`` are used. They keep no state on objects: no annotation, no finalizer. An
event says only *which pool* to look at; what to do is planned from the indices.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import kopf

from twinpool.core import protocol
from twinpool.operator.logic.observed import Child, PodView, pool_key, read_child, read_pod

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PoolKey = tuple[str, str]

_POOLS = "pools"
_PODS = "pods"
#: Children that are watched: the id of the index, then group, version and plural for kopf.
_CHILDREN: Mapping[str, tuple[str, tuple[str, str, str]]] = {
    "StatefulSet": ("statefulsets", ("apps", "v1", "statefulsets")),
    "Deployment": ("deployments", ("apps", "v1", "deployments")),
    "Service": ("services", ("", "v1", "services")),
    "ServiceAccount": ("serviceaccounts", ("", "v1", "serviceaccounts")),
    "Role": ("roles", ("rbac.authorization.k8s.io", "v1", "roles")),
    "RoleBinding": ("rolebindings", ("rbac.authorization.k8s.io", "v1", "rolebindings")),
}


class Cache:
    """What the watches have seen, by pool. A view of kopf's indices: reading it asks nobody."""

    def __init__(self) -> None:
        self._indices: Mapping[str, Mapping[PoolKey, Iterable[Any]]] = {}

    def attach(self, indices: Mapping[str, Mapping[PoolKey, Iterable[Any]]]) -> None:
        """Use kopf's indices from now on."""
        self._indices = indices

    def pools(self) -> list[PoolKey]:
        """Return the keys of all pools."""
        return list(self._indices.get(_POOLS, {}))

    def pool(self, key: PoolKey) -> dict[str, Any] | None:
        """Return a pool as the API server sent it, without managed fields, or None when there is none."""
        found: list[dict[str, Any]] = list(self._indices.get(_POOLS, {}).get(key, ()))
        return found[0] if found else None

    def children(self, key: PoolKey) -> list[Child]:
        """Return the objects that belong to a pool."""
        ids = (index for index, _ in _CHILDREN.values())
        return [child for index in ids for child in self._indices.get(index, {}).get(key, ())]

    def pods(self, key: PoolKey) -> tuple[PodView, ...]:
        """Return the pods of a pool."""
        return tuple(self._indices.get(_PODS, {}).get(key, ()))


def watch_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: post nothing, scan nothing, receive only what carries our label."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.peering.standalone = True
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.process.ultimate_exiting_timeout = 10.0
    ours = f"{protocol.LABEL_MANAGED_BY}={protocol.MANAGED_BY}"
    settings.watching.label_selectors["", "v1", "pods"] = ours
    for _, resource in _CHILDREN.values():
        settings.watching.label_selectors[resource] = ours
    return settings


#: Called for every event with the pool that it concerns and, when a group is gone, the group's name.
Seen = Callable[[PoolKey, str], None]


def watch_registry(cache: Cache, seen: Seen) -> kopf.OperatorRegistry:
    """Return kopf's handlers: they fill ``cache`` and call ``seen`` for the pool that an event concerns."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(id="login", registry=registry)(_login)

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


async def _login(**kwargs: Any) -> kopf.ConnectionInfo | None:
    """Log in as :func:`twinpool.operator.shell.cluster.configuration` does; called again after a 401."""
    in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
    if not in_cluster:
        return kopf.login_with_kubeconfig(**kwargs)
    login = kopf.login_with_service_account(**kwargs)
    if login is None:
        return None
    # kopf says kubernetes.default.svc, which needs cluster DNS; every pod is told the address.
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return dataclasses.replace(login, server=f"https://{f'[{host}]' if ':' in host else host}:{port}")
