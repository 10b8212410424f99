"""A pod template with the administrator's defaults under it: the pool's own fields, and later its podTemplate, win."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.operator.logic.merge import merge

if TYPE_CHECKING:
    from twinpool.core.pod_defaults import PartDefaults, PodDefaults


def with_defaults(template: dict[str, Any], shared: PodDefaults, part: PartDefaults, container: str) -> dict[str, Any]:
    """Return the template with what it leaves open filled in: maps and keyed lists by key, other fields as a whole."""
    common = shared.model_dump(by_alias=True, include={"labels", "annotations"})
    fields = part.model_dump(mode="json", by_alias=True, exclude={"env"}, exclude_none=True)
    spec: dict[str, Any] = {key: value for key, value in fields.items() if value}
    if shared.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret.name} for secret in shared.image_pull_secrets]
    if part.env:
        # Whole entries: a value of ours beside a valueFrom of the pool would be neither.
        taken = {entry["name"] for own in template["spec"]["containers"] for entry in own["env"]}
        entries = [entry.model_dump(by_alias=True, exclude_none=True) for entry in part.env if entry.name not in taken]
        spec["containers"] = [{"name": container, "env": entries}]
    metadata = {key: value for key, value in common.items() if value}
    return merge({"metadata": metadata, "spec": spec}, template)
