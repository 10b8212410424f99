"""The value of ``--kv-transfer-config``: the handoff between prefill and decode, and the tiers behind the accelerator.

Checked against vLLM 0.32. Several connectors are one ``MultiConnector``, which loads from the first that has
something: the handoff stands first, because a decode worker that found a part in its own tier would compute the rest.
Always true: both ends of a handoff name the same connector for it, with tiers or without.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.errors import InvalidValue

if TYPE_CHECKING:
    from twinpool.core.protocol import WorkerConfig

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_CONNECTORS = {"nixl": "NixlConnector"}


def kv_transfer(config: WorkerConfig, *, on_cpu: bool) -> str | None:
    """Return the flag's value as JSON; None for an engine that neither hands over nor keeps anything elsewhere.

    Raises
    ------
    InvalidValue
        When tiers or a store are asked for on the CPU, where vLLM has none.
    """
    handoff, tiers = _handoff(config, on_cpu=on_cpu), _tiers(config, on_cpu=on_cpu) or _store(config, on_cpu=on_cpu)
    if handoff and tiers:
        found: dict[str, Any] = {
            "kv_connector": "MultiConnector",
            "kv_role": handoff["kv_role"],
            "kv_connector_extra_config": {"connectors": [handoff, tiers]},
        }
    else:
        found = handoff or tiers
    if not found:
        return None
    if tiers and config.role != "decode":
        # A block that cannot be read back is computed. Not on decode: there it would hide a handoff that failed.
        found["kv_load_failure_policy"] = "recompute"
    return json.dumps(found, sort_keys=True, separators=(",", ":"))


def _handoff(config: WorkerConfig, *, on_cpu: bool) -> dict[str, Any]:
    if config.connector is None or config.role not in _ROLES:
        return {}
    # Whole seconds: the connector divides it into heartbeats.
    lease = {"kv_lease_duration": int(protocol.KV_LEASE_SECONDS)}
    connector = {"kv_connector": _CONNECTORS[config.connector], "kv_role": _ROLES[config.role]}
    return {**connector, "kv_connector_extra_config": lease, **({"kv_buffer_device": "cpu"} if on_cpu else {})}


def _tiers(config: WorkerConfig, *, on_cpu: bool) -> dict[str, Any]:
    if not config.host_kv_bytes:
        return {}
    if on_cpu:
        raise InvalidValue(
            "kvCache.tiers needs a GPU: vLLM's OffloadingConnector does not run on the CPU",
            "remove kvCache.tiers from the role, or give it GPUs",
        )
    # Each copy of the model in this pod has a tier of its own.
    extra: dict[str, Any] = {"cpu_bytes_to_use": config.host_kv_bytes // max(1, config.data // config.nodes)}
    places = (
        (config.disk_kv_bytes, protocol.KV_DISK_DIRECTORY),
        (config.shared_kv_bytes, protocol.KV_SHARED_DIRECTORY),
    )
    behind = [{"type": "fs", "root_dir": directory} for size, directory in places if size]
    if behind:
        extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": behind}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _store(config: WorkerConfig, *, on_cpu: bool) -> dict[str, Any]:
    """Return the connector of a store beside the pool; roles of it both read and write."""
    if config.kv_store is None:
        return {}
    if on_cpu:
        raise InvalidValue(
            "kvCache.store needs a GPU: the connectors of LMCache and Mooncake move blocks from and to one",
            "remove kvCache.store from the role, or give it GPUs",
        )
    if config.kv_store == "mooncake":
        # Its other settings are in a file: mooncake_settings().
        return {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    # LMCache counts in GiB, for each rank.
    settings = {
        "lmcache.remote_url": config.kv_store_address,
        "lmcache.local_cpu": True,
        "lmcache.max_local_cpu_size": config.kv_store_bytes // _local_ranks(config) / 2**30,
    }
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": settings}


def mooncake_settings(config: WorkerConfig) -> str | None:
    """Return the content of the file that ``MOONCAKE_CONFIG_PATH`` names; None without a Mooncake store.

    ``embedded``: each rank adds memory of its own, in bytes (vLLM 0.32, ``distributed/mooncake_store.py``).
    """
    if config.kv_store != "mooncake":
        return None
    settings = {
        "mode": "embedded",
        "metadata_server": config.kv_store_metadata or "P2PHANDSHAKE",
        "master_server_address": config.kv_store_address,
        "protocol": config.kv_store_protocol,
        "device_name": "",
        "global_segment_size": config.kv_store_bytes // _local_ranks(config),
    }
    return json.dumps(settings, sort_keys=True)


def _local_ranks(config: WorkerConfig) -> int:
    return max(1, config.tensor * config.pipeline * config.data // config.nodes)
