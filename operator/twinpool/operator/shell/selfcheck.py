"""Before anything is watched: is the CRD there and new enough, and may we do what we must?

An operator without its rights looks healthy and does nothing, or half. This one says what is missing, in its log and
on ``/readyz``, and begins as soon as it is there.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.crd import custom_resource_definition
from twinpool.operator.logic import compute_domain
from twinpool.operator.logic.rights import (
    COMPUTE_DOMAIN_RIGHTS,
    LEASE_RIGHTS,
    PLACEMENT_RIGHTS,
    RIGHTS,
    Right,
    attributes,
    in_words,
    missing_fields,
)
from twinpool.operator.shell.cluster import ApiRefused

if TYPE_CHECKING:
    from twinpool.operator.logic.settings import ComputeDomains
    from twinpool.operator.shell.cluster import Cluster

_log = logging.getLogger(__name__)

CRD_NAME = f"{protocol.PLURAL}.{protocol.GROUP}"
#: Questions that are asked at the same time.
_AT_ONCE = 16


async def problem(cluster: Cluster, namespace: str, lease_namespace: str, lease_name: str) -> str:
    """Return what keeps the operator from its work and what to do about it, empty when nothing does."""
    try:
        missing = await _missing_rights(cluster, namespace, lease_namespace, lease_name)
        if missing:
            return (
                f"the operator may not do what it must ({in_words(missing)}) - apply deploy/operator.yaml, or "
                "deploy/namespaced/operator.yaml (--namespace) for one namespace"
            )
        await cluster.any(protocol.KIND, namespace)
        return await _crd_age(cluster)
    except ApiRefused as error:
        return crd_problem(error)


async def sees_nodes(cluster: Cluster) -> bool:
    """Return whether we may do in the whole cluster what choosing nodes takes."""
    questions = [attributes(right, verb, "") for right in PLACEMENT_RIGHTS for verb in right.verbs]
    try:
        return all([await cluster.allowed(what) for what in questions])
    except ApiRefused as error:
        _log.warning("whether nodes may be read cannot be checked: %s", error)
        return False


async def compute_domains(cluster: Cluster, namespace: str) -> ComputeDomains:
    """Return whether groups can get ComputeDomains, as it is now: a driver that comes later is seen after a restart."""
    questions = [attributes(right, verb, namespace) for right in COMPUTE_DOMAIN_RIGHTS for verb in right.verbs]
    try:
        served = await cluster.read(f"/apis/{compute_domain.API_VERSION}")
        if not any(item.get("kind") == compute_domain.KIND for item in served.get("resources") or ()):
            return "NotServed"
        if all([await cluster.allowed(what) for what in questions]):
            return "Served"
    except ApiRefused as error:
        if error.code != 404:
            _log.warning("whether ComputeDomains are served cannot be checked: %s", error)
        return "NotServed"
    _log.info("the cluster has ComputeDomains, which the operator may not make: groups that span nodes get none")
    return "NotAllowed"


def crd_problem(error: ApiRefused) -> str:
    """Return what a failed list of pools means."""
    if error.code == 404:
        return f"the CRD {CRD_NAME} is not installed; waiting for it - kubectl apply -f crds/{CRD_NAME}.yaml"
    if error.code == 403:
        return f"{error.message} - apply deploy/operator.yaml, or start with --namespace where only that is allowed"
    return f"the pools cannot be listed: {error}"


async def _missing_rights(
    cluster: Cluster, namespace: str, lease_namespace: str, lease_name: str
) -> list[tuple[Right, str]]:
    """Return the rights that the API server says we do not have; one that cannot tell counts as willing."""
    questions = [(right, verb, attributes(right, verb, namespace)) for right in RIGHTS for verb in right.verbs]
    questions += [
        (right, verb, attributes(right, verb, lease_namespace, lease_name))
        for right in LEASE_RIGHTS
        for verb in right.verbs
    ]
    gate = asyncio.Semaphore(_AT_ONCE)

    async def ask(what: dict[str, str]) -> bool:
        async with gate:
            return await cluster.allowed(what)

    try:
        answers = await asyncio.gather(*(ask(what) for _, _, what in questions))
    except ApiRefused as error:
        if error.code not in (403, 404):
            raise
        _log.warning("the operator's rights cannot be checked: %s", error)
        return []
    return [(right, verb) for (right, verb, _), allowed in zip(questions, answers, strict=True) if not allowed]


async def _crd_age(cluster: Cluster) -> str:
    """Compare the served schema with ours: a status that it does not know could not be written."""
    try:
        document = await cluster.read(f"/openapi/v3/apis/{protocol.API_VERSION}")
    except ApiRefused as error:
        if error.code not in (403, 404):
            raise
        return ""  # a server that does not describe itself to everybody
    served = _served(document)
    ours = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    missing = {part: missing_fields(ours[part], served.get(part, {}), part) for part in ("spec", "status")}
    if missing["status"]:
        return (
            f"the CRD {CRD_NAME} is older than this operator: it does not know {', '.join(missing['status'])} "
            f"- kubectl apply --server-side -f crds/{CRD_NAME}.yaml"
        )
    if missing["spec"]:
        _log.warning(
            "the CRD is older than this operator: %s cannot be set; kubectl apply --server-side -f crds/%s.yaml",
            ", ".join(missing["spec"]),
            CRD_NAME,
        )
    return ""


def _served(document: dict[str, Any]) -> dict[str, Any]:
    for schema in (document.get("components") or {}).get("schemas", {}).values():
        kinds = [item.get("kind") for item in schema.get("x-kubernetes-group-version-kind") or ()]
        if protocol.KIND in kinds:
            found: dict[str, Any] = schema.get("properties") or {}
            return found
    return {}
