"""Merging a user's ``podTemplate`` into ours the way ``kubectl patch`` (strategic merge) would.

Objects merge by key, lists that Kubernetes keys (containers by name, ports by number) merge entry by entry, every
other list and every scalar is replaced. The user has the last word, except on what :func:`merge` is then called with
a second time: the parts that must stay ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Merge keys of the lists in a pod template (``patchMergeKey`` of the Kubernetes API). A list that is not here is
#: atomic: it is replaced as a whole.
MERGE_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "resourceClaims": ("name",),
    "claims": ("name",),
    "schedulingGates": ("name",),
}

#: What the API server fills in when a key's part is left out.
_KEY_DEFAULTS = {"protocol": "TCP"}


def merge_key(field: str, entry: Any) -> tuple[Any, ...] | None:
    """Return what identifies ``entry`` within the list called ``field``, or None when the list is atomic."""
    keys = MERGE_KEYS.get(field)
    if keys is None or not isinstance(entry, Mapping) or keys[0] not in entry:
        return None
    return tuple(entry.get(key, _KEY_DEFAULTS.get(key)) for key in keys)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``over`` merged into it; a null in ``over`` removes the key. Neither input is changed."""
    result = dict(base)
    for field, value in over.items():
        if value is None:
            result.pop(field, None)
            continue
        result[field] = _merge_value(field, result.get(field), value)
    return result


def _merge_value(field: str, base: Any, over: Any) -> Any:
    if isinstance(over, Mapping):
        return merge(base if isinstance(base, Mapping) else {}, over)
    if isinstance(over, list):
        return _merge_list(field, base if isinstance(base, list) else [], over)
    return over


def _merge_list(field: str, base: list[Any], over: list[Any]) -> list[Any]:
    if any(merge_key(field, entry) is None for entry in over):
        return list(over)
    result = {merge_key(field, entry): entry for entry in base}
    if None in result:
        result = {}
    for entry in over:
        key = merge_key(field, entry)
        result[key] = merge(result.get(key, {}), entry)
    return list(result.values())
