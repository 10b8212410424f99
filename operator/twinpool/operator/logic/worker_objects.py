"""The objects of the worker roles: a headless Service per role, a StatefulSet per serving group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.merge import merge
from twinpool.operator.logic.pods import Template, nodes_of, with_revision

if TYPE_CHECKING:
    from twinpool.core.spec import InferencePool

Body = dict[str, Any]


def headless_service(pool: InferencePool, role: str) -> Body:
    """Return the Service that gives a role's pods their DNS names; pods that are not ready yet have theirs too."""
    port = {
        "name": protocol.ENGINE_PORT_NAME,
        "port": protocol.ENGINE_PORT,
        "targetPort": protocol.ENGINE_PORT_NAME,
        "protocol": "TCP",
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(pool, names.child_name(pool, role), role),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector(pool, role),
            "ports": [port],
        },
    }


def group_set(
    pool: InferencePool,
    role: str,
    template: Template,
    revision: str,
    serial: int,
    name: str,
    placing: Body | None = None,
) -> Body:
    """Return the StatefulSet of a group: a pod for each node, started together, replaced by nobody but the operator.

    ``placing`` is what :func:`twinpool.operator.logic.pinning.placing` adds to it; None adds nothing.
    """
    added = placing or {"annotations": {}, "spec": {}}
    group = {protocol.LABEL_GROUP: name}
    metadata = merge(
        names.metadata(pool, name, role),
        {
            "labels": {**group, protocol.LABEL_REVISION: revision},
            "annotations": {names.SERIAL_ANNOTATION: str(serial), **added["annotations"]},
        },
    )
    pods = merge(with_revision(template, revision), {"metadata": {"labels": group}, "spec": added["spec"]})
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata,
        "spec": {
            "replicas": nodes_of(template),
            "serviceName": names.child_name(pool, role),
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "OnDelete"},
            "selector": {"matchLabels": group},
            "template": pods,
        },
    }
