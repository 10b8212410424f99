"""The connectors that an engine is given: the handoff, tiers behind the accelerator, or both in order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core.errors import InvalidValue
from twinpool.localengine.pod import worker_config
from twinpool.worker.engines.command import Pod
from twinpool.worker.engines.select import engine_command
from twinpool.worker.engines.vllm.transfer import kv_transfer

if TYPE_CHECKING:
    from twinpool.core.protocol import WorkerConfig

GI = 2**30


def config(**changes: Any) -> WorkerConfig:
    own: dict[str, Any] = {"role": "prefill", "gpus": 1, "connector": "nixl", "host_kv_bytes": 64 * GI}
    return worker_config(**{**own, **changes})


def transfer(**changes: Any) -> dict[str, Any]:
    text = kv_transfer(config(**changes), on_cpu=False)
    return {} if text is None else json.loads(text)  # type: ignore[no-any-return]


def test_a_host_tier_alone_is_one_connector() -> None:
    assert transfer(role="aggregated", connector=None) == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 64 * GI},
        "kv_load_failure_policy": "recompute",
    }


def test_the_handoff_comes_first_because_only_one_connector_loads_a_prompt() -> None:
    made = transfer()
    assert (made["kv_connector"], made["kv_role"]) == ("MultiConnector", "kv_producer")
    names = [inner["kv_connector"] for inner in made["kv_connector_extra_config"]["connectors"]]
    assert names == ["NixlConnector", "OffloadingConnector"]
    assert all("engine_id" not in inner for inner in made["kv_connector_extra_config"]["connectors"])


def test_a_handoff_that_fails_is_not_hidden_on_decode() -> None:
    assert transfer()["kv_load_failure_policy"] == "recompute"
    assert "kv_load_failure_policy" not in transfer(role="decode")
    assert "kv_load_failure_policy" not in transfer(host_kv_bytes=0)


def test_disk_and_shared_tiers_are_folders_behind_the_hosts_memory() -> None:
    made = transfer(connector=None, disk_kv_bytes=GI, shared_kv_bytes=GI)["kv_connector_extra_config"]
    assert made["spec_name"] == "TieringOffloadingSpec"
    assert made["secondary_tiers"] == [
        {"type": "fs", "root_dir": "/twinpool-kv/disk"},
        {"type": "fs", "root_dir": "/twinpool-kv/shared"},
    ]


@pytest.mark.parametrize(("data", "nodes", "share"), [(1, 1, 64), (4, 1, 16), (4, 2, 32)])
def test_the_copies_of_a_pod_share_its_host_tier(data: int, nodes: int, share: int) -> None:
    made = transfer(connector=None, data=data, nodes=nodes)
    assert made["kv_connector_extra_config"]["cpu_bytes_to_use"] == share * GI


def test_there_are_none_on_the_cpu() -> None:
    with pytest.raises(InvalidValue, match=r"kvCache\.tiers needs a GPU"):
        kv_transfer(config(), on_cpu=True)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--no-enable-prefix-caching", r"contradicts kvCache\.tiers"),
        ("--kv-offloading-size=8", "--kv-offloading-size, which Twinpool sets"),
        ("--kv_offloading_backend", "--kv-offloading-backend, which Twinpool sets"),
        ("--kv-transfer-config", "--kv-transfer-config, which Twinpool sets"),
    ],
)
def test_arguments_that_contradict_are_refused_by_name(args: str, named: str) -> None:
    with pytest.raises(InvalidValue, match=named):
        engine_command(config(args=(args,)), Pod("10.0.0.7"), {}, 1, "python3")


LMCACHE = {"kv_store": "lmcache", "kv_store_address": "lm://store:65432", "kv_store_bytes": 64 * GI}
MOONCAKE = {"kv_store": "mooncake", "kv_store_address": "master:50051", "kv_store_bytes": 64 * GI}


def test_a_store_stands_behind_the_handoff() -> None:
    made = transfer(host_kv_bytes=0, tensor=4, **LMCACHE)
    assert (made["kv_connector"], made["kv_load_failure_policy"]) == ("MultiConnector", "recompute")
    handoff, store = made["kv_connector_extra_config"]["connectors"]
    assert handoff["kv_connector"] == "NixlConnector"
    assert store == {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.remote_url": "lm://store:65432",
            "lmcache.local_cpu": True,
            "lmcache.max_local_cpu_size": 16.0,
        },
    }
    assert "kv_load_failure_policy" not in transfer(role="decode", host_kv_bytes=0, **LMCACHE)


def test_mooncake_reads_its_settings_from_a_file() -> None:
    whole = config(role="aggregated", connector=None, host_kv_bytes=0, tensor=8, nodes=2, **MOONCAKE)
    command = engine_command(whole, Pod("10.0.0.7"), {}, 1, "python3")
    path = command.environment["MOONCAKE_CONFIG_PATH"]
    assert json.loads(command.files[path]) == {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "master:50051",
        "protocol": "rdma",
        "device_name": "",
        "global_segment_size": 16 * GI,
    }
    assert command.environment["PYTHONHASHSEED"]
    assert transfer(role="aggregated", connector=None, host_kv_bytes=0, **MOONCAKE)["kv_connector"] == (
        "MooncakeStoreConnector"
    )
    assert not engine_command(config(), Pod("10.0.0.7"), {}, 1, "python3").files


def test_both_ends_of_a_handoff_agree_on_the_memory_of_layers() -> None:
    plain = engine_command(config(plain_kv=True), Pod("10.0.0.7"), {}, 1, "python3").argv
    assert "--disable-hybrid-kv-cache-manager" in plain
    assert "--disable-hybrid-kv-cache-manager" not in engine_command(config(), Pod("10.0.0.7"), {}, 1, "python3").argv


def test_a_store_needs_a_gpu_the_real_engine_and_prefix_caching() -> None:
    stored = config(host_kv_bytes=0, **MOONCAKE)
    with pytest.raises(InvalidValue, match=r"kvCache\.store needs a GPU"):
        kv_transfer(stored, on_cpu=True)
    with pytest.raises(InvalidValue, match=r"kvCache\.store is not simulated"):
        engine_command(config(engine="simulated", host_kv_bytes=0, **MOONCAKE), Pod("10.0.0.7"), {}, 1, "python3")
    off = config(host_kv_bytes=0, args=("--no-enable-prefix-caching",), **MOONCAKE)
    with pytest.raises(InvalidValue, match=r"contradicts kvCache\.store"):
        engine_command(off, Pod("10.0.0.7"), {}, 1, "python3")
