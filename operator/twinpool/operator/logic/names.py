"""Names and labels of everything that belongs to a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.core import protocol

if TYPE_CHECKING:
    from twinpool.core.spec import InferencePool, WorkerRole

#: ``true`` on a group's StatefulSet that is on its way out: scaled to 0 and deleted once its pods are gone.
RETIRED_ANNOTATION = f"{protocol.GROUP}/retired"
#: On such a StatefulSet: until when its pods stay although they get nothing to do (RFC 3339), in case they are missed.
KEPT_ANNOTATION = f"{protocol.GROUP}/kept-until"
#: Number of a group within its pool, from which its name is made.
SERIAL_ANNOTATION = f"{protocol.GROUP}/serial"
#: Highest number given to a group so far; kept on the router's Service so that no number is given twice.
LAST_SERIAL_ANNOTATION = f"{protocol.GROUP}/last-serial"

#: On a group's StatefulSet: how often its engine was restarted in place, as JSON.
RESTARTS_ANNOTATION = f"{protocol.GROUP}/engine-restarts"
#: On a group's StatefulSet: what the preflight of its leader's present start measured, as JSON.
INTERCONNECT_ANNOTATION = f"{protocol.GROUP}/interconnect"
#: On the router Deployment: uid of the ServiceAccount that its pods were started with. In its template: restarts them.
ACCOUNT_ANNOTATION = f"{protocol.GROUP}/service-account"
#: ``pin`` or ``affinity`` on a group's StatefulSet: how its pods get their nodes, for as long as the group lives.
PLACEMENT_ANNOTATION = f"{protocol.GROUP}/placement"
#: On the StatefulSet of a group that only new nodes can hold: label and nodes of its pods' affinity.
GROWTH_ANNOTATION = f"{protocol.GROUP}/placement-growth"

#: ``true`` on a group's StatefulSet whose pods claim a channel of a ComputeDomain, for as long as the group lives.
COMPUTE_DOMAIN_ANNOTATION = f"{protocol.GROUP}/compute-domain"

ROUTER = protocol.ROUTER_ROLE


def roles(pool: InferencePool) -> dict[str, WorkerRole]:
    """Return the roles that the pool has."""
    if pool.spec.prefill is None:
        return {"decode": pool.spec.decode}
    return {"prefill": pool.spec.prefill, "decode": pool.spec.decode}


def child_name(pool: InferencePool, role: str) -> str:
    """Return the name of the objects that a role has one of (its Service; the router's Deployment and access)."""
    return f"{pool.metadata.name}-{role}"


def labels(pool: InferencePool, role: str) -> dict[str, str]:
    """Return the labels that every child of the pool carries."""
    return {
        protocol.LABEL_MANAGED_BY: protocol.MANAGED_BY,
        protocol.LABEL_POOL: pool.metadata.name,
        protocol.LABEL_ROLE: role,
    }


def selector(pool: InferencePool, role: str) -> dict[str, str]:
    """Return the labels by which a role's pods are found."""
    return {protocol.LABEL_POOL: pool.metadata.name, protocol.LABEL_ROLE: role}


def owner_reference(pool: InferencePool) -> dict[str, Any]:
    """Return the reference that lets Kubernetes delete a child with its pool.

    Without ``blockOwnerDeletion``, which would ask for rights on the pool's finalizers.
    """
    return {
        "apiVersion": protocol.API_VERSION,
        "kind": protocol.KIND,
        "name": pool.metadata.name,
        "uid": pool.metadata.uid,
        "controller": True,
    }


def metadata(pool: InferencePool, name: str, role: str) -> dict[str, Any]:
    """Return the metadata of a child."""
    return {
        "name": name,
        "namespace": pool.metadata.namespace,
        "labels": labels(pool, role),
        "ownerReferences": [owner_reference(pool)],
    }
