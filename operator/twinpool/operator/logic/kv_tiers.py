"""What the KV tiers of a role need of its pods: memory, space on a disk, volumes.

The host tier is a file in ``/dev/shm`` (vLLM 0.32, ``v1/kv_offload/cpu/shared_offload_region.py``), so it counts
against the size of that volume and the container's memory. An emptyDir of a disk tier has no size limit: the launcher
keeps the tier within its size, and a kubelet that saw a limit passed for a moment would evict the pod.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.kv_cache import KvCache
from twinpool.core.units import parse_bytes

if TYPE_CHECKING:
    from twinpool.core.spec import WorkerRole

Body = dict[str, Any]

_DISK, _SHARED = "kv-disk", "kv-shared"


def tiers(role: WorkerRole) -> KvCache:
    """Return the tiers of a role, which may be none."""
    return role.kv_cache or KvCache()


def store_bytes(role: WorkerRole) -> int:
    """Return the memory that a pod adds to a store beside the pool, in bytes; 0 without one."""
    store = tiers(role).store
    return parse_bytes(store.size) if store else 0


def plain(role: WorkerRole) -> bool:
    """Return whether the role's connector needs layers of one kind of memory.

    LMCache's does (vLLM 0.32: it is no ``SupportsHMA``), and both ends of a handoff must agree on it.
    """
    store = tiers(role).store
    return store is not None and store.kind == "lmcache"


def shm(role: WorkerRole) -> str:
    """Return the size of ``/dev/shm``: that of the role, and the host tier."""
    host = tiers(role).bytes("host")
    return str(parse_bytes(role.resources.shm) + host) if host else role.resources.shm


def resources(role: WorkerRole) -> tuple[Body, Body]:
    """Return requests and limits of memory and disk. A role without ``resources.memory`` is not limited by its tier."""
    host, disk = tiers(role).bytes("host") + store_bytes(role), tiers(role).tier("disk")
    requests: Body = {}
    limits: Body = {}
    if role.resources.memory:
        memory = str(parse_bytes(role.resources.memory) + host) if host else role.resources.memory
        requests["memory"] = limits["memory"] = memory
    elif host:
        requests["memory"] = str(host)
    if disk is not None and disk.storage_class is None:
        requests["ephemeral-storage"] = disk.size
    return requests, limits


def volumes(role: WorkerRole) -> list[Body]:
    """Return the volumes of disk and shared tiers."""
    found: list[Body] = []
    disk, shared = tiers(role).tier("disk"), tiers(role).tier("shared")
    if disk is not None and disk.storage_class is None:
        found.append({"name": _DISK, "emptyDir": {}})
    elif disk is not None:
        claim = {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": disk.storage_class,
            "resources": {"requests": {"storage": disk.size}},
        }
        found.append({"name": _DISK, "ephemeral": {"volumeClaimTemplate": {"spec": claim}}})
    if shared is not None:
        found.append({"name": _SHARED, "persistentVolumeClaim": {"claimName": shared.claim}})
    return found


def mounts(role: WorkerRole) -> list[Body]:
    """Return where the engine's container finds them."""
    places = {"disk": (_DISK, protocol.KV_DISK_DIRECTORY), "shared": (_SHARED, protocol.KV_SHARED_DIRECTORY)}
    return [{"name": name, "mountPath": path} for kind, (name, path) in places.items() if tiers(role).tier(kind)]  # type: ignore[arg-type]
