"""What counters of an engine say of its tiers, and of computing."""

import pytest

from twinpool.cli.scrape import parse
from twinpool.core.tier_use import TierUse, compute_seconds, stored_bytes, uses

PAGE = """
vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 5000
vllm:prompt_tokens_cached_by_source_total{engine="0",source="host"} 300
vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 700
vllm:kv_offload_load_time_total{engine="0"} 0.1
vllm:kv_offload_load_bytes_total{engine="0"} 2000
vllm:kv_offload_store_bytes_total{engine="0"} 9000
vllm:kv_offload_tiering_read_bytes_total{engine="0",tier="1:fs"} 400
vllm:kv_offload_tiering_read_time_total{engine="0",tier="1:fs"} 0.2
vllm:kv_offload_tiering_read_bytes_total{engine="0",tier="2:fs"} 1000
vllm:kv_offload_tiering_read_time_total{engine="0",tier="2:fs"} 5
vllm:request_prefill_time_seconds_sum{engine="0"} 4
vllm:request_prefill_kv_computed_tokens_sum{engine="0"} 8000
"""


def test_what_each_tier_gave_back_and_how_long_it_took():
    host, disk, shared = uses(parse(PAGE).total, ("host", "disk", "shared"))
    assert (host.kind, host.tokens, host.seconds_per_token) == ("host", 300, pytest.approx(1e-4))
    assert (disk.tokens, disk.seconds) == (200, pytest.approx(0.2 + 200 * 1e-4))
    assert (shared.tokens, shared.seconds_per_token) == (500, pytest.approx(0.01 + 1e-4))
    assert stored_bytes(parse(PAGE).total) == 9000
    assert compute_seconds(parse(PAGE).total) == pytest.approx(0.0005)


def test_without_tiers_or_traffic_nothing_is_said():
    assert uses(parse(PAGE).total, ()) == ()
    assert uses(parse("").total, ("host", "disk")) == (TierUse("host", 0.0, 0.0), TierUse("disk", 0.0, 0.0))
    assert TierUse("host", 0.0, 0.0).seconds_per_token is None
    assert compute_seconds(parse("").total) is None
