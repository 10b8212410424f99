"""Revisions of a pool: what its worker pods are made of, kept as ControllerRevision objects.

Prefill and decode share one revision, since a pair hands its KV cache over only when both run the same engine and
model. A revision holds two things: the *inputs*, that part of the pool's spec which pods are made of, and the
*templates* that were rendered from them once. Always true:

* groups are made and repaired from the stored template of their revision, never from a fresh one, so another version
  of the operator, which renders differently, changes no pod;
* the pool is at a stored revision when its inputs are equal, or render to equal pods with the renderer at hand: so
  replicas, routing, defaults that are spelled out and fields without effect on pods start no rollout, and a pool that
  is put back finds its old revision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from twinpool.core import protocol
from twinpool.core.spec import InferencePool
from twinpool.operator.logic import names
from twinpool.operator.logic.drift import digest
from twinpool.operator.logic.pods import Template, with_revision, worker_template

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Child, Observed
    from twinpool.operator.logic.settings import Settings

#: Characters of a revision: short in ``kubectl get``, and 40 bits are far more than a pool's history needs.
LENGTH = 10
KIND = "ControllerRevision"

#: Blocks of the spec that pods are made of, besides the roles.
BLOCKS = ("model", "engine", "handoff", "tracing", "speculation")


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision. ``number`` counts up; the highest one is that which the pool asked for last."""

    name: str
    number: int
    #: The part of the spec that pods are made of, set fields only, with the asked-for restart.
    inputs: Mapping[str, Any]
    #: Pod templates by role, without what group and revision add.
    templates: Mapping[str, Template]


def inputs(pool: InferencePool) -> dict[str, Any]:
    """Return what pods are made of: set fields only, so that a default that is spelled out makes no difference."""
    spec = pool.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    found: dict[str, Any] = {block: spec[block] for block in BLOCKS if spec.get(block)}
    for role in names.roles(pool):
        found[role] = {key: value for key, value in (spec.get(role) or {}).items() if key != "replicas" and value != {}}
    if restart := pool.metadata.annotations.get(protocol.ANNOTATION_RESTART):
        found["restart"] = restart
    return found


def with_inputs(pool: InferencePool, given: Mapping[str, Any]) -> InferencePool:
    """Return the pool as it was when it had these inputs; its name, its replicas and all else are today's.

    Raises
    ------
    ValueError
        When the inputs were written by a version with other fields.
    """
    spec = pool.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    now = {key: value for key, value in spec.items() if key not in (*BLOCKS, *protocol.ROLES)}
    blocks = {block: given[block] for block in BLOCKS if block in given}
    roles = {
        role: {**given[role], **{key: value for key, value in (spec.get(role) or {}).items() if key == "replicas"}}
        for role in protocol.ROLES
        if role in given
    }
    annotations = {key: value for key, value in pool.metadata.annotations.items() if key != protocol.ANNOTATION_RESTART}
    if "restart" in given:
        annotations[protocol.ANNOTATION_RESTART] = given["restart"]
    metadata = pool.metadata.model_copy(update={"annotations": annotations})
    return InferencePool.model_validate({"metadata": metadata, "spec": {**now, **blocks, **roles}})


def rendered(pool: InferencePool, settings: Settings) -> dict[str, Template]:
    """Return the pod templates by role, as the renderer at hand makes them."""
    return {name: worker_template(pool, name, role, settings) for name, role in names.roles(pool).items()}


def stored(observed: Observed) -> tuple[Revision, ...]:
    """Return the pool's revisions, oldest first. One that another version wrote in another shape is passed over."""
    found = []
    for child in observed.children:
        data = child.content.get("data") or {}
        if child.kind == KIND and not child.deleting and {"inputs", "templates"} <= data.keys():
            name = child.name.removeprefix(object_name(observed.pool.metadata.name, ""))
            found.append(Revision(name, child.content.get("revision", 0), data["inputs"], data["templates"]))
    return tuple(sorted(found, key=lambda revision: (revision.number, revision.name)))


def target(observed: Observed, known: Sequence[Revision], existing: Iterable[Group], settings: Settings) -> Revision:
    """Return the revision that the pool asks for, which may be new, with the number that it must have."""
    wanted = inputs(observed.pool)
    found = _matching(observed.pool, known, wanted, settings) or _missing(observed, known, wanted, existing, settings)
    if known and found.name == known[-1].name:
        return found
    number = max((revision.number for revision in known), default=0)
    return Revision(found.name, number + 1, found.inputs, found.templates)


def _missing(
    observed: Observed,
    known: Sequence[Revision],
    wanted: Mapping[str, Any],
    existing: Iterable[Group],
    settings: Settings,
) -> Revision:
    """Return the revision that is not stored: one whose object somebody deleted, an adopted one, or a new one."""
    templates = rendered(observed.pool, settings)
    taken = {child.name for child in observed.children if child.kind == KIND}
    fresh = Revision(_free_name(observed.pool.metadata.name, templates, taken), 0, wanted, templates)
    groups = [group for group in existing if not group.retired]
    if known or any(group.revision == fresh.name for group in groups):
        return fresh
    return _adopted(observed, fresh, groups) or fresh


def _matching(
    pool: InferencePool, known: Sequence[Revision], wanted: Mapping[str, Any], settings: Settings
) -> Revision | None:
    equal = [revision for revision in known if revision.inputs == wanted]
    if equal:
        return equal[-1]
    if not known:
        return None
    now = rendered(pool, settings)
    return next((revision for revision in reversed(known) if _renders(pool, revision, settings) == now), None)


def _renders(pool: InferencePool, revision: Revision, settings: Settings) -> dict[str, Template] | None:
    try:
        return rendered(with_inputs(pool, revision.inputs), settings)
    except ValidationError:
        return None


def _adopted(observed: Observed, fresh: Revision, existing: Iterable[Group]) -> Revision | None:
    """Return the revision of groups that a version without stored revisions made, if they are what the pool asks for.

    That version said so in the status, for a generation; what the groups' sets hold is then what was rendered.
    """
    pool, name = observed.pool, observed.pool.status.revision or ""
    children = {group.role: group.child for group in existing if group.revision == name}
    if not children or pool.status.observed_generation != pool.metadata.generation:
        return None
    run = {role: _template_of(child) for role, child in children.items() if role in fresh.templates}
    return Revision(name, 0, fresh.inputs, {**fresh.templates, **run})


def _template_of(child: Child) -> Template:
    template = with_revision(child.content["spec"]["template"], "")
    ours = (protocol.LABEL_GROUP, protocol.LABEL_REVISION)
    labels = {key: value for key, value in template["metadata"]["labels"].items() if key not in ours}
    metadata = {key: value for key, value in template["metadata"].items() if value is not None}
    return {"metadata": {**metadata, "labels": labels}, "spec": template["spec"]}


def _free_name(pool: str, templates: Mapping[str, Any], taken: set[str]) -> str:
    name, salt = digest(dict(templates))[:LENGTH], 0
    while object_name(pool, name) in taken:
        salt += 1
        name = digest([salt, dict(templates)])[:LENGTH]
    return name


def object_name(pool: str, revision: str) -> str:
    """Return the name of the object that keeps a pool's revision."""
    return f"{pool}-{revision}"


def revision_object(pool: InferencePool, revision: Revision) -> dict[str, Any]:
    """Return the ControllerRevision that keeps a revision; its data can never be changed, only its number."""
    ours = names.labels(pool, "")
    labels = {key: value for key, value in ours.items() if key != protocol.LABEL_ROLE}
    return {
        "apiVersion": "apps/v1",
        "kind": KIND,
        "metadata": {
            "name": object_name(pool.metadata.name, revision.name),
            "namespace": pool.metadata.namespace,
            "labels": {**labels, protocol.LABEL_REVISION: revision.name},
            "ownerReferences": [names.owner_reference(pool)],
        },
        "revision": revision.number,
        "data": {"inputs": dict(revision.inputs), "templates": dict(revision.templates)},
    }


def surplus(known: Sequence[Revision], wanted: str, existing: Iterable[Group], limit: int) -> set[str]:
    """Return the names of revisions beyond the history limit: neither wanted nor that of any group, the oldest."""
    used = {wanted, *(group.revision for group in existing)}
    idle = [revision.name for revision in known if revision.name not in used]
    return set(idle[: max(0, len(idle) - limit)])
