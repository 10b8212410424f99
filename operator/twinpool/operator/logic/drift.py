"""Whether a live object still says what was applied.

The API server adds defaults and other writers add fields of their own, so the question is whether the live object
*contains* the wanted one. Fields that we no longer want are found by the digest annotation: it is part of the wanted
content, so content with a field less has another digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.operator.logic.merge import merge_key

if TYPE_CHECKING:
    from twinpool.operator.logic.observed import Child

#: Maps that Kubernetes takes as a whole: a key that somebody added changes what they mean.
ATOMIC_MAPS = ("selector", "nodeSelector")

#: Digest of what was applied.
APPLIED_ANNOTATION = f"{protocol.GROUP}/applied"


def digest(content: Any) -> str:
    """Return a short digest that is equal for equal JSON, whatever the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stamped(body: dict[str, Any]) -> dict[str, Any]:
    """Return ``body`` with its own digest as an annotation."""
    metadata = body["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: digest(body)}
    return {**body, "metadata": {**metadata, "annotations": annotations}}


def in_place(child: Child | None, wanted: dict[str, Any]) -> bool:
    """Return whether ``child`` exists and says everything that ``wanted`` says.

    A child that is being deleted is left alone: its end is an event, after which it is made anew.
    """
    if child is None:
        return False
    if child.deleting:
        return True
    return contains_wanted(child, wanted) or child.settled == digest(wanted)


def contains_wanted(child: Child, wanted: Mapping[str, Any]) -> bool:
    """Return whether everything that was applied, its digest included, is in the child."""
    content = {key: value for key, value in wanted.items() if key not in ("apiVersion", "kind")}
    kept = ("labels", "annotations", "ownerReferences")
    content["metadata"] = {key: value for key, value in wanted["metadata"].items() if key in kept}
    return contains(child.content, content)


def contains(live: Any, wanted: Any, field: str = "") -> bool:
    """Return whether everything in ``wanted`` is in ``live``; lists that Kubernetes keys are compared by key."""
    if wanted in (None, {}, []):
        return live in (None, {}, []) or isinstance(live, Mapping)
    if field in ATOMIC_MAPS:
        return bool(live == wanted)
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(contains(live.get(k), value, k) for k, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(live, Sequence) and _contains_list(live, wanted, field)
    return bool(live == wanted)


def _contains_list(live: Sequence[Any], wanted: list[Any], field: str) -> bool:
    by_key = {merge_key(field, entry): entry for entry in live}
    if None in by_key or any(merge_key(field, entry) is None for entry in wanted):
        return len(live) == len(wanted) and all(contains(a, b) for a, b in zip(live, wanted, strict=True))
    return all(contains(by_key.get(merge_key(field, entry)), entry) for entry in wanted)
