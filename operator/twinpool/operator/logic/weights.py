"""Where a pool's weights are in its pods: a volume that holds them, or a cache into which launchers fetch them.

The cache is what the hub's client and vLLM call ``HF_HOME``. Without ``model.cache`` it is a volume of the pod, so that
a container that is restarted finds what was fetched, also with a read-only root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.core import protocol

if TYPE_CHECKING:
    from collections.abc import Collection

    from twinpool.core.spec import InferencePool

Body = dict[str, Any]

#: Where the volume of a ``pvc://`` or ``oci://`` model is mounted, and what the path in it begins with.
MODEL_DIRECTORY = "/models"
_PATH_MARK = {"pvc": "/", "oci": "#"}
_MODEL, _CACHE = "model", "weights"
#: A user who gives one of these keeps weights at a place of their own.
_HOMES = ("HF_HOME", "HF_HUB_CACHE")


def model_path(pool: InferencePool) -> str:
    """Return what the engine is told to load: an id of the Hugging Face hub or a path in the container."""
    scheme, rest = _source(pool)
    if scheme in _PATH_MARK:
        return f"{MODEL_DIRECTORY}/{rest.partition(_PATH_MARK[scheme])[2].lstrip('/')}".rstrip("/")
    return rest


def volumes(pool: InferencePool) -> list[Body]:
    """Return the volumes of the model and of the cache."""
    scheme, rest = _source(pool)
    found: list[Body] = []
    held = rest.partition(_PATH_MARK[scheme])[0] if scheme in _PATH_MARK else ""
    if scheme == "pvc":
        found.append({"name": _MODEL, "persistentVolumeClaim": {"claimName": held, "readOnly": True}})
    if scheme == "oci":
        # The kubelet fetches an image once for each node, whoever mounts it.
        found.append({"name": _MODEL, "image": {"reference": held, "pullPolicy": "IfNotPresent"}})
    if _fetches(pool):
        found.append({"name": _CACHE, **_cache(pool)})
    return found


def mounts(pool: InferencePool) -> list[Body]:
    """Return where the engine's container finds them."""
    places: dict[str, Body] = {
        _MODEL: {"mountPath": MODEL_DIRECTORY, "readOnly": True},
        _CACHE: {"mountPath": protocol.WEIGHTS_DIRECTORY},
    }
    return [{"name": volume["name"], **places[volume["name"]]} for volume in volumes(pool)]


def environment(pool: InferencePool, given: Collection[str]) -> list[Body]:
    """Return the variable that names the cache, unless one of those that a user has ``given`` does."""
    if not _fetches(pool) or any(name in given for name in _HOMES):
        return []
    return [{"name": "HF_HOME", "value": protocol.WEIGHTS_DIRECTORY}]


def _source(pool: InferencePool) -> tuple[str, str]:
    scheme, _, rest = (pool.spec.model.source or f"hf://{pool.spec.model.name}").partition("://")
    return scheme, rest


def _fetches(pool: InferencePool) -> bool:
    """Return whether launchers fetch the model, or the one that drafts for it."""
    draft = pool.spec.speculation.model if pool.spec.speculation else None
    ids = _source(pool)[0] == "hf" or (draft is not None and not draft.startswith("/"))
    return pool.spec.engine.kind == "vllm" and ids


def _cache(pool: InferencePool) -> Body:
    cache = pool.spec.model.cache
    if cache is None:
        return {"emptyDir": {}}
    if cache.claim is not None:
        return {"persistentVolumeClaim": {"claimName": cache.claim}}
    return {"hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
