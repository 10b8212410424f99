"""One NVIDIA ComputeDomain for each group that spans nodes, so that its GPUs may map each other's memory over NVLink.

Racks whose NVLink leaves the node (GB200 NVL72) close it between pods by default. NVIDIA's driver for dynamic resource
allocation opens it: it answers a ComputeDomain with a template of resource claims, and pods that claim a channel by it
reach each other and nobody else (``resource.nvidia.com/v1beta1``, ``kubernetes-sigs/dra-driver-nvidia-gpu``). Where no
GPU has such links, it hands out channels that open nothing.

Whether a group has one is decided when it is made and noted on its StatefulSet, as with its nodes: a driver that is
installed or an edit starts no rollout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.pods import nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Child, Observed
    from twinpool.operator.logic.pods import Template
    from twinpool.operator.logic.settings import Settings

KIND, API_VERSION = "ComputeDomain", "resource.nvidia.com/v1beta1"

#: What the status says: each group has one, or why none has.
State = Literal["PerGroup", "NotServed", "NotAllowed", "Never", "OwnClaims"]

#: Name of the claim within a pod.
_CLAIM = "compute-domain"
_VENDOR = "nvidia.com/"
_ORDER: tuple[State, ...] = ("PerGroup", "OwnClaims", "Never", "NotAllowed", "NotServed")


def state(pool: InferencePool, templates: Iterable[Template], settings: Settings) -> State | None:
    """Return what new groups of these templates get; None without ``placement`` or groups that could use any."""
    found = {each for template in templates if (each := _state(pool, template, settings))}
    return next((each for each in _ORDER if each in found), None)


def _state(pool: InferencePool, template: Template, settings: Settings) -> State | None:
    wants = pool.spec.placement
    if wants is None or nodes_of(template) == 1 or not _has_nvidia(template):
        return None
    if wants.compute_domain == "never":
        return "Never"
    # Who claims devices by hand has arranged this too, or cannot have it twice.
    if template["spec"].get("resourceClaims"):
        return "OwnClaims"
    return "PerGroup" if settings.compute_domains == "Served" else settings.compute_domains


def _has_nvidia(template: Template) -> bool:
    containers = template["spec"]["containers"]
    limits = [(container.get("resources") or {}).get("limits") or {} for container in containers]
    return any(name.startswith(_VENDOR) for each in limits for name in each)


def chosen(pool: InferencePool, template: Template, settings: Settings) -> bool:
    """Return whether a group that is made now gets a domain."""
    return _state(pool, template, settings) == "PerGroup"


def noted(group: Group) -> bool:
    """Return whether a group was made with a domain."""
    return group.child.annotation(names.COMPUTE_DOMAIN_ANNOTATION) == "true"


def claiming(group: str) -> dict[str, Any]:
    """Return what a group's StatefulSet gets so that its pods claim a channel: annotations, and parts of the spec."""
    container = {"name": protocol.ENGINE_CONTAINER, "resources": {"claims": [{"name": _CLAIM}]}}
    claim = {"name": _CLAIM, "resourceClaimTemplateName": group}
    return {
        "annotations": {names.COMPUTE_DOMAIN_ANNOTATION: "true"},
        "spec": {"containers": [container], "resourceClaims": [claim]},
    }


def domains(pool: InferencePool, sets: Iterable[Mapping[str, Any]], settings: Settings) -> list[dict[str, Any]]:
    """Return the domains of these StatefulSets, none where nobody serves them any more.

    ``numNodes`` is 0, as the driver recommends since 25.8: its daemons wait for nobody, a lost node may be replaced.
    """
    if settings.compute_domains != "Served":
        return []
    return [
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": names.metadata(pool, body["metadata"]["name"], body["metadata"]["labels"][protocol.LABEL_ROLE]),
            "spec": {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": body["metadata"]["name"]}}},
        }
        for body in sets
        if body["metadata"]["annotations"].get(names.COMPUTE_DOMAIN_ANNOTATION) == "true"
    ]


def left_over(observed: Observed, sets: Iterable[str]) -> list[Child]:
    """Return the domains without a group; ``sets`` are the StatefulSets that are there or about to be."""
    used = {*sets, *(pod.group for pod in observed.pods)}
    return [
        child for child in observed.children if child.kind == KIND and not child.deleting and child.name not in used
    ]
