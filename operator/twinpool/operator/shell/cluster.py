"""Writes to the API server: dictionaries in, dictionaries out, over the official client's connections and credentials.

Reads go through the watches (:mod:`twinpool.operator.shell.watch`). Read here is the Lease, and what the watches cannot
tell: whether an object exists that they do not show, and whether one that they show still does.
"""

from __future__ import annotations

import asyncio
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
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from twinpool.operator.shell.metrics import Metrics

Body = Mapping[str, Any]

#: Where each kind lives: the path of its API and its plural.
RESOURCES: Mapping[str, tuple[str, str]] = {
    protocol.KIND: (f"/apis/{protocol.API_VERSION}", protocol.PLURAL),
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "Pod": ("/api/v1", "pods"),
    "Node": ("/api/v1", "nodes"),
    "ControllerRevision": ("/apis/apps/v1", "controllerrevisions"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "Event": ("/api/v1", "events"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "ComputeDomain": ("/apis/resource.nvidia.com/v1beta1", "computedomains"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
}

FIELD_MANAGER = "twinpool/reconciler"
STATUS_MANAGER = "twinpool/status"
SCALING_MANAGER = "twinpool/scaling"

#: Seconds for one request, and the longest time that the server may ask to be left alone.
TIMEOUT = 10.0
MAX_RETRY_AFTER = 300.0

_INVALID = 422
_UNKNOWN_FIELD = "field not declared in schema"

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_JSON_PATCH = "application/json-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"
_JSON = "application/json"
#: Lists without the objects' content: what is compared is the uid alone.
_NAMES_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

#: Objects in one answer of a list, and seconds between two renewals of refused credentials.
_PAGE = 500
_RENEW_PAUSE = 5.0
_UNAUTHORIZED = 401


class ApiRefused(TwinpoolError):
    """The API server answered with an error; ``code`` is the HTTP status, 0 when there was no answer.

    ``retry_after`` is the number of seconds for which the server wants to be left alone.
    """

    def __init__(self, code: int, message: str, retry_after: float = 0.0) -> None:
        answer = f"the API server answered {code}: {message}" if code else f"the API server does not answer: {message}"
        super().__init__(answer)
        self.code = code
        self.message = message
        self.retry_after = retry_after


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
            await config.load_kube_config(os.environ.get("KUBECONFIG"), client_configuration=result)
    except config.ConfigException as error:
        looked = os.environ.get("KUBECONFIG", str(Path.home() / ".kube/config"))
        raise ClusterUnreachable(
            f"no cluster is configured ({error}; looked at {looked})",
            "run inside a pod with a service account, or set KUBECONFIG",
        ) from None
    return result


class Cluster:
    """The API server, as far as the operator writes to it.

    ``renew`` reads the credentials anew; it is called when they are refused, since tokens are replaced while we run.
    """

    def __init__(
        self, settings: client.Configuration, metrics: Metrics, renew: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        self._metrics = metrics
        self._renew = renew
        self._renewed = float("-inf")
        self._renewing = asyncio.Lock()
        self._client = _api_client(settings)
        #: Since when every request was answered, by the loop's clock; None while the server gives no answer.
        self.answering_since: float | None = None
        #: Whether the last answer was that our credentials are not known.
        self.unauthorized = False

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def apply(self, body: Body) -> dict[str, Any]:
        """Apply a whole object server-side as ``twinpool/reconciler`` and return it as it is now."""
        path = object_path(body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])
        return await self._patch(path, _APPLY, body, FIELD_MANAGER)

    async def try_out(self, body: Body) -> None:
        """Apply a whole object as :meth:`apply` would, but in a dry run: nothing is stored."""
        path = object_path(body["kind"], body["metadata"]["namespace"], body["metadata"]["name"])
        await self._patch(path, _APPLY, body, FIELD_MANAGER, dryRun="All")

    async def apply_status(self, namespace: str, name: str, uid: str, status: Body) -> dict[str, Any]:
        """Apply the status of a pool as ``twinpool/status``; refused when the pool is another one of that name."""
        body = {
            "apiVersion": protocol.API_VERSION,
            "kind": protocol.KIND,
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "status": status,
        }
        return await self._patch(object_path(protocol.KIND, namespace, name) + "/status", _APPLY, body, STATUS_MANAGER)

    async def apply_scaling(
        self, namespace: str, name: str, uid: str, resource_version: str, scaling: Body | None
    ) -> dict[str, Any]:
        """Apply ``status.scaling`` as ``twinpool/scaling``, or take it away; refused when the pool has changed."""
        body = {
            "apiVersion": protocol.API_VERSION,
            "kind": protocol.KIND,
            "metadata": {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": resource_version},
            "status": {} if scaling is None else {"scaling": scaling},
        }
        return await self._patch(object_path(protocol.KIND, namespace, name) + "/status", _APPLY, body, SCALING_MANAGER)

    async def merge(self, kind: str, namespace: str, name: str, body: Body) -> dict[str, Any]:
        """Merge ``body`` into an object; a uid or resourceVersion in it is a condition."""
        return await self._patch(object_path(kind, namespace, name), _MERGE, body, FIELD_MANAGER)

    async def patch_exactly(self, kind: str, namespace: str, name: str, patch: Sequence[Body]) -> dict[str, Any]:
        """Apply a JSON patch; refused with 422 when one of its tests fails."""
        # The client sends anything but a list as another kind of patch.
        return await self._patch(object_path(kind, namespace, name), _JSON_PATCH, list(patch), FIELD_MANAGER)

    async def set_pod_condition(self, namespace: str, name: str, uid: str, condition: Body) -> dict[str, Any]:
        """Set one condition of a pod, which is merged by its type; refused when the pod is another one of that name."""
        body = {"metadata": {"uid": uid}, "status": {"conditions": [condition]}}
        return await self._patch(object_path("Pod", namespace, name) + "/status", _STRATEGIC, body, STATUS_MANAGER)

    async def delete(self, kind: str, namespace: str, name: str, uid: str, resource_version: str) -> None:
        """Delete an object if it is still the one that was observed; what it owns goes in the background.

        An empty ``resource_version`` deletes it whatever has changed of it.
        """
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid, **({"resourceVersion": resource_version} if resource_version else {})},
        }
        await self._request("DELETE", object_path(kind, namespace, name), options)

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        """Read one object."""
        return await self._request("GET", object_path(kind, namespace, name))

    async def events(self, namespace: str, kind: str, name: str) -> list[dict[str, Any]]:
        """Return some Events about failed creations for an object."""
        selector = f"involvedObject.kind={kind},involvedObject.name={name},reason=FailedCreate"
        query = urlencode({"fieldSelector": selector, "limit": 50})
        found = await self._request("GET", f"{list_path('Event', namespace)}?{query}")
        return list(found.get("items") or ())

    async def create(self, kind: str, namespace: str, body: Body) -> dict[str, Any]:
        """Create an object; refused with 409 when there is one."""
        return await self._request("POST", list_path(kind, namespace), body)

    async def replace(self, kind: str, namespace: str, name: str, body: Body) -> dict[str, Any]:
        """Replace an object; refused with 409 when its resourceVersion is another one."""
        return await self._request("PUT", object_path(kind, namespace, name), body)

    async def read(self, path: str) -> dict[str, Any]:
        """Read what is no object of ours, such as the API's own description of itself."""
        return await self._request("GET", path)

    async def allowed(self, attributes: Body) -> bool:
        """Return whether we may do what ``attributes`` (``ResourceAttributes``) say."""
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = await self._request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
        return bool(answer["status"].get("allowed"))

    async def uids(self, kind: str, namespace: str, selector: str) -> set[str]:
        """Return the uids of all objects of ``kind`` that a label selector (empty: none) leaves."""
        query = {"limit": str(_PAGE)}
        if selector:
            query["labelSelector"] = selector
        result: set[str] = set()
        while True:
            path = f"{list_path(kind, namespace)}?{urlencode(query)}"
            found = await self._request("GET", path, accept=_NAMES_ONLY)
            result.update(item["metadata"]["uid"] for item in found.get("items") or ())
            query["continue"] = (found.get("metadata") or {}).get("continue") or ""
            if not query["continue"]:
                return result

    async def pages(self, kind: str, query: Mapping[str, str]) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield all objects of a kind in the cluster that ``query`` leaves, a page at a time."""
        asked = {"limit": str(_PAGE), **query}
        while True:
            found = await self._request("GET", f"{list_path(kind, '')}?{urlencode(asked)}")
            yield found.get("items") or []
            asked["continue"] = (found.get("metadata") or {}).get("continue") or ""
            if not asked["continue"]:
                return

    async def any(self, kind: str, namespace: str) -> bool:
        """Return whether there is an object of ``kind`` (in all namespaces when ``namespace`` is empty)."""
        found = await self._request("GET", list_path(kind, namespace) + "?limit=1")
        return bool(found.get("items"))

    async def _patch(
        self, path: str, content_type: str, body: Body | Sequence[Body], manager: str, **more: str
    ) -> dict[str, Any]:
        query = {"fieldManager": manager, "fieldValidation": "Strict", **more}
        if content_type == _APPLY:
            query["force"] = "true"
        return await self._request("PATCH", f"{path}?{urlencode(query)}", body, content_type)

    async def _request(
        self,
        verb: str,
        path: str,
        body: Body | Sequence[Body] | None = None,
        content_type: str = _JSON,
        accept: str = _JSON,
    ) -> dict[str, Any]:
        headers = {"Content-Type": content_type, "Accept": accept}
        used = self._client
        status, text, retry_after = await self._send(verb, path, headers, body)
        if status == _UNAUTHORIZED and await self._renewed_credentials(used):
            status, text, retry_after = await self._send(verb, path, headers, body)
        self.unauthorized = status == _UNAUTHORIZED
        if status >= 400:
            reason = _reason(text)
            # An applied object with a field that does not exist is the writer's mistake, but answered with 500.
            raise ApiRefused(_INVALID if _UNKNOWN_FIELD in reason else status, reason, retry_after)
        answer: dict[str, Any] = json.loads(text)
        return answer

    async def _send(
        self, verb: str, path: str, headers: Mapping[str, str], body: Body | Sequence[Body] | None
    ) -> tuple[int, bytes, float]:
        """Return status, body and the seconds to wait that the server asks for."""
        call = await self._client.param_serialize(
            verb, path, header_params=dict(headers), body=body, auth_settings=["BearerToken"]
        )
        try:
            response = await self._client.call_api(*call, _request_timeout=TIMEOUT)
            text: bytes = await response.read()
        except (OSError, TimeoutError, client.ApiException, RuntimeError) as error:
            # RuntimeError: the session was closed because another request renewed the credentials.
            self._metrics.api_requests.labels(verb, "error").inc()
            self.answering_since = None
            raise ApiRefused(0, f"{type(error).__name__}: {error}") from error
        self._metrics.api_requests.labels(verb, str(response.status)).inc()
        if self.answering_since is None:
            self.answering_since = asyncio.get_running_loop().time()
        return response.status, text, _seconds(response.getheaders().get("Retry-After"))

    async def _renewed_credentials(self, refused: client.ApiClient) -> bool:
        """Read the credentials anew, at most every few seconds; return whether it is worth trying again."""
        async with self._renewing:
            now = asyncio.get_running_loop().time()
            if self._client is not refused:
                return True
            if self._renew is None or now < self._renewed + _RENEW_PAUSE:
                return False
            self._renewed = now
            self._client = _api_client(await self._renew())
        await refused.close()
        return True


def _api_client(settings: client.Configuration) -> client.ApiClient:
    made = client.ApiClient(settings)
    made.user_agent = "twinpool-operator"
    return made


def _seconds(retry_after: str | None) -> float:
    """Read a ``Retry-After`` header; the API server sends seconds, a date is not worth parsing."""
    try:
        return max(0.0, min(float(retry_after or 0.0), MAX_RETRY_AFTER))
    except ValueError:
        return 0.0


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
