"""KV tiers of a worker: what is expected of them, what they did, and what is removed from those that grow."""

from __future__ import annotations

import fcntl
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.localengine.pod import worker_config
from twinpool.worker.logic import report, tiers
from twinpool.worker.logic.pricing import Surroundings
from twinpool.worker.logic.supervisor import State
from twinpool.worker.logic.trimming import AFTER, KvFile, surplus
from twinpool.worker.shell.trimmer import Trimmer

if TYPE_CHECKING:
    from pathlib import Path

    from twinpool.core.protocol import WorkerConfig

GI = 2**30
PAGE = """
vllm:prompt_tokens_cached_by_source_total{engine="0",source="host"} 300.0
vllm:kv_offload_load_time_total{engine="0"} 0.1
vllm:kv_offload_load_bytes_total{engine="0"} 2000.0
vllm:kv_offload_store_bytes_total{engine="0"} 5368709120.0
vllm:request_prefill_time_seconds_sum{engine="0"} 4.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0"} 8000.0
"""


def config(**changes: Any) -> WorkerConfig:
    own: dict[str, Any] = {"role": "prefill", "gpus": 1, "host_kv_bytes": 4 * GI, "disk_kv_bytes": 400 * GI}
    return worker_config(**{**own, **changes})


def test_what_is_expected_names_its_grounds() -> None:
    words = tiers.expected(config(), Surroundings())
    assert words.startswith("host (4 GiB, 32768 tokens) pays from 256 tokens on, disk (400 GiB, ")
    assert "an 8B model on an H100 is assumed; estimated, with assumed bandwidths" in words
    assert tiers.expected(config(host_kv_bytes=0, disk_kv_bytes=0), Surroundings()) == ""
    fast = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 64, "vocab_size": 100}
    tiny = tiers.expected(config(), Surroundings("NVIDIA H100 80GB HBM3", {**fast, "intermediate_size": 64}))
    assert "loses against computing" in tiny


def test_what_tiers_did_is_in_status_and_metrics() -> None:
    state = tiers.read(config(), PAGE, {"disk": 77})
    assert state is not None
    seen = report.Snapshot(State(), "vllm", "m", "prefill", "1", tiers="words", tier_state=state)
    told = json.loads(report.status(seen))["kvTiers"]
    assert (told["expected"], told["computeSecondsPerToken"]) == ("words", 0.0005)
    host, disk = told["tiers"]
    assert (host["kind"], host["bytes"], host["loadedTokens"], host["evictedBytes"]) == ("host", 4 * GI, 300, GI)
    assert host["loadSecondsPerToken"] == pytest.approx(0.1 / 300)
    assert (disk["loadedTokens"], disk["loadSecondsPerToken"], disk["evictedBytes"]) == (0, None, 77)
    page = report.metrics(seen)
    assert 'twinpool_worker_kv_tier_evicted_bytes_total{tier="disk"} 77' in page
    assert 'twinpool_worker_kv_tier_token_load_seconds{tier="host"} 0.000333' in page
    assert 'token_load_seconds{tier="disk"}' not in page
    assert "twinpool_worker_kv_token_compute_seconds 0.0005" in page


def test_nothing_is_said_where_there_is_nothing_to_say() -> None:
    assert tiers.read(config(host_kv_bytes=0, disk_kv_bytes=0), PAGE, {}) is None
    state = tiers.read(config(role="decode"), "", {})
    assert state is not None
    assert state.compute is None
    page = report.metrics(report.Snapshot(State(), "vllm", "m", "decode", "1", tiers="w", tier_state=state))
    assert "kv_token_compute" not in page
    assert "kv_tier_token_load" not in page
    early = json.loads(report.status(report.Snapshot(State(), "vllm", "m", "decode", "1", tiers="w")))
    assert early["kvTiers"] == {"expected": "w"}


files = st.lists(
    st.builds(KvFile, st.text(min_size=1), st.integers(1, 100), st.floats(0, 9)), unique_by=lambda f: f.path
)


@given(found=files, bound=st.integers(1, 2000))
def test_the_oldest_give_way_and_no_more_than_must(found: list[KvFile], bound: int) -> None:
    gone = surplus(found, bound)
    left = sum(file.size for file in found) - sum(file.size for file in gone)
    assert left <= bound
    if gone:
        assert sum(file.size for file in found) > bound
        assert left + gone[-1].size > AFTER * bound
        stay = [file for file in found if file not in gone]
        assert all(file.written >= gone[-1].written for file in stay)


def written(folder: Path, name: str, age: int, size: int = 100) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (1000 - age, 1000 - age))
    return path


def test_a_folder_is_kept_within_its_size(tmp_path: Path) -> None:
    old, new = written(tmp_path, "m/a/old.bin", 50), written(tmp_path, "m/b/new.bin", 1)
    other = written(tmp_path, "m/config.json", 99)
    (tmp_path / "m" / "loop").symlink_to(tmp_path)
    one = Trimmer({"disk": (tmp_path, 150)}, print)
    one.trim("disk")
    assert not old.exists()
    assert new.exists()
    assert other.exists(), "only blocks are counted and removed"
    assert one.removed == {"disk": 100}
    one.trim("disk")
    assert one.removed == {"disk": 100}


def test_pods_that_share_a_folder_take_turns(tmp_path: Path) -> None:
    block = written(tmp_path, "a.bin", 1)
    with (tmp_path / ".twinpool-trim").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        Trimmer({"shared": (tmp_path, 10)}, print).trim("shared")
    assert block.exists()
    Trimmer({"shared": (tmp_path, 10)}, print).trim("shared")
    assert not block.exists()


def test_without_places_nothing_runs() -> None:
    Trimmer({}, print).start()
