"""Writes to the API server: dictionaries in, dictionaries out, over the official client's connections and credentials.

Reads go through the watches (:mod:`twinpool.operator.shell.watch`); the only object that is read here is the Lease.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from kubernetes.aio import client, config

from twinpool.core import protocol
from twinpool.core.errors import TwinpoolError

if TYPE_CHECKING:
    from twinpool.operator.shell.metrics import Metrics

Body = Mapping[str, Any]

#: Where each kind lives: the path of its API and its plural.
RESOURCES: Mapping[str, tuple[str, str]] = {
    protocol.KIND: (f"/apis/{protocol.API_VERSION}", protocol.PLURAL),
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
}

FIELD_MANAGER = "twinpool/reconciler"
STATUS_MANAGER = "twinpool/status"

#: Seconds for one request.
TIMEOUT = 10.0

_INVALID = 422
_UNKNOWN_FIELD = "field not declared in schema"

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON = "application/json"


class ApiRefused(TwinpoolError):
    """The API server answered with an error; ``code`` is the HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"the API server answered {code}: {message}")
        self.code = code
        self.message = message


class ClusterUnreachable(TwinpoolError):
    """There are no credentials for a cluster."""


async def configuration() -> client.Configuration:
    """Return address and credentials: ``KUBECONFIG`` if set, else the pod's service account, else ``~/.kube/config``.

    Raises
    ------
    ClusterUnreachable
        When none of the three is there.
    """
    result = client.Configuration()
    in_cluster = "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
    try:
        if in_cluster:
            config.load_incluster_config(client_configuration=result)
        else:
            await config.load_kube_config(client_configuration=result)
    except config.ConfigException as error:
        looked = os.environ.get("KUBECONFIG", str(Path.home() / ".kube/config"))
        raise ClusterUnreachable(
            f"no cluster is configured ({error}; looked at {looked})",
            "run inside a pod with a service account, or set KUBECONFIG",
        ) from None
    return result


class Cluster:
    """The API server, as far as the operator writes to it."""

    def __init__(self, settings: client.Configuration, metrics: Metrics) -> None:
        self._client = client.ApiClient(settings)
        self._client.user_agent = "twinpool-operator"
        self._metrics = metrics

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def apply(self, body: Body) -> dict[str, Any]:
        """Apply a whole object server-side as ``twinpool/reconciler`` and return it as it is now."""
        path = object_path(body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])
        return await self._patch(path, _APPLY, body, FIELD_MANAGER)

    async def apply_status(self, namespace: str, name: str, uid: str, status: Body) -> dict[str, Any]:
        """Apply the status of a pool as ``twinpool/status``; refused when the pool is another one of that name."""
        body = {
            "apiVersion": protocol.API_VERSION,
            "kind": protocol.KIND,
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "status": status,
        }
        return await self._patch(object_path(protocol.KIND, namespace, name) + "/status", _APPLY, body, STATUS_MANAGER)

    async def merge(self, kind: str, namespace: str, name: str, body: Body) -> dict[str, Any]:
        """Merge ``body`` into an object; a uid or resourceVersion in it is a condition."""
        return await self._patch(object_path(kind, namespace, name), _MERGE, body, FIELD_MANAGER)

    async def delete(self, kind: str, namespace: str, name: str, uid: str, resource_version: str) -> None:
        """Delete an object if it is still the one that was observed; what it owns goes in the background."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid, "resourceVersion": resource_version},
        }
        await self._request("DELETE", object_path(kind, namespace, name), options)

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        """Read one object."""
        return await self._request("GET", object_path(kind, namespace, name))

    async def create(self, kind: str, namespace: str, body: Body) -> dict[str, Any]:
        """Create an object; refused with 409 when there is one."""
        return await self._request("POST", list_path(kind, namespace), body)

    async def replace(self, kind: str, namespace: str, name: str, body: Body) -> dict[str, Any]:
        """Replace an object; refused with 409 when its resourceVersion is another one."""
        return await self._request("PUT", object_path(kind, namespace, name), body)

    async def any(self, kind: str, namespace: str) -> bool:
        """Return whether there is an object of ``kind`` (in all namespaces when ``namespace`` is empty)."""
        found = await self._request("GET", list_path(kind, namespace) + "?limit=1")
        return bool(found.get("items"))

    async def _patch(self, path: str, content_type: str, body: Body, manager: str) -> dict[str, Any]:
        query = {"fieldManager": manager, "fieldValidation": "Strict"}
        if content_type == _APPLY:
            query["force"] = "true"
        return await self._request("PATCH", f"{path}?{urlencode(query)}", body, content_type)

    async def _request(
        self, verb: str, path: str, body: Body | None = None, content_type: str = _JSON
    ) -> dict[str, Any]:
        headers = {"Content-Type": content_type, "Accept": _JSON}
        call = await self._client.param_serialize(
            verb, path, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            response = await self._client.call_api(*call, _request_timeout=TIMEOUT)
            text = await response.read()
        except (OSError, TimeoutError, client.ApiException) as error:
            self._metrics.api_requests.labels(verb, "error").inc()
            raise ApiRefused(0, f"{type(error).__name__}: {error}") from error
        self._metrics.api_requests.labels(verb, str(response.status)).inc()
        if response.status >= 400:
            reason = _reason(text)
            # An applied object with a field that does not exist is the writer's mistake, but answered with 500.
            raise ApiRefused(_INVALID if _UNKNOWN_FIELD in reason else response.status, reason)
        answer: dict[str, Any] = json.loads(text)
        return answer


def object_path(kind: str, namespace: str, name: str) -> str:
    """Return the path of an object."""
    return f"{list_path(kind, namespace)}/{quote(name, safe='')}"


def list_path(kind: str, namespace: str) -> str:
    """Return the path of all objects of a kind, in one namespace or (empty) in all."""
    api, plural = RESOURCES[kind]
    return f"{api}/namespaces/{quote(namespace, safe='')}/{plural}" if namespace else f"{api}/{plural}"


def _reason(text: bytes) -> str:
    try:
        message = json.loads(text).get("message")
    except (ValueError, AttributeError):
        message = None
    return str(message or text.decode(errors="replace")[:500] or "no reason was given")
