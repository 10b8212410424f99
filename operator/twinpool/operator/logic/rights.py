"""What the operator must be allowed to do, and what its CRD must know. A test compares the rights with ``deploy/``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from twinpool.core import protocol

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Right:
    """Verbs on a resource; ``resource`` may name a subresource, as in ``pods/status``."""

    group: str
    resource: str
    verbs: tuple[str, ...]


_READ = ("get", "list", "watch")
_MAKE = (*_READ, "create", "patch")

#: Rights in every namespace that is served.
RIGHTS = (
    Right(protocol.GROUP, protocol.PLURAL, _READ),
    Right(protocol.GROUP, f"{protocol.PLURAL}/status", ("patch",)),
    Right("apps", "statefulsets", (*_MAKE, "delete")),
    Right("apps", "controllerrevisions", (*_MAKE, "delete")),
    Right("apps", "deployments", (*_MAKE, "delete")),
    Right("", "services", (*_MAKE, "delete")),
    Right("", "serviceaccounts", _MAKE),
    Right("rbac.authorization.k8s.io", "roles", _MAKE),
    Right("rbac.authorization.k8s.io", "rolebindings", _MAKE),
    Right("", "pods", (*_READ, "patch")),
    Right("", "events", ("list", "create", "patch")),
    Right("", "pods/status", ("patch",)),
    Right("policy", "poddisruptionbudgets", (*_MAKE, "delete")),
)
#: Rights without which no node can be chosen; pools are served all the same, with nodes of kube-scheduler's choice.
PLACEMENT_RIGHTS = (
    Right("", "nodes", ("list",)),
    Right("", "pods", ("list", "delete")),
)
#: Rights without which groups that span nodes get no ComputeDomain.
COMPUTE_DOMAIN_RIGHTS = (Right("resource.nvidia.com", "computedomains", (*_MAKE, "delete")),)
#: Rights on the Lease, in its own namespace.
LEASE_RIGHTS = (Right("coordination.k8s.io", "leases", ("create", "get", "update")),)


def attributes(right: Right, verb: str, namespace: str, name: str = "") -> dict[str, str]:
    """Return the ``ResourceAttributes`` of one question; an empty namespace asks about all of them."""
    resource, _, subresource = right.resource.partition("/")
    found = {
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
        "verb": verb,
        "namespace": namespace,
        "name": name if verb != "create" else "",
    }
    return {key: value for key, value in found.items() if value}


def missing_fields(wanted: Schema, served: Schema, path: str = "") -> list[str]:
    """Return the paths of fields that ``wanted`` has and ``served`` has not; what is only in ``served`` is newer."""
    if served.get("x-kubernetes-preserve-unknown-fields"):
        return []
    result: list[str] = []
    known = served.get("properties") or {}
    for name, schema in (wanted.get("properties") or {}).items():
        where = f"{path}.{name}" if path else name
        result += missing_fields(schema, known[name], where) if name in known else [where]
    for inner, shown in (("items", "[]"), ("additionalProperties", "{}")):
        if isinstance(wanted.get(inner), Mapping) and isinstance(served.get(inner), Mapping):
            result += missing_fields(wanted[inner], served[inner], path + shown)
    return result


def in_words(missing: Iterable[tuple[Right, str]]) -> str:
    """Return what is not allowed, grouped by resource: ``statefulsets.apps: create, patch``."""
    verbs: dict[str, list[str]] = {}
    for right, verb in missing:
        name = f"{right.resource}.{right.group}" if right.group else right.resource
        verbs.setdefault(name, []).append(verb)
    return "; ".join(f"{name}: {', '.join(found)}" for name, found in sorted(verbs.items()))
