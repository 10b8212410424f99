"""Tiers of the simulated engine: what they hold and forget, and that a loaded prompt answers like a computed one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.errors import InvalidValue
from twinpool.worker.engines.simulated import flags
from twinpool.worker.engines.simulated.logic.blocks import Removed, Stored
from twinpool.worker.engines.simulated.logic.engine import Engine, Limits
from twinpool.worker.engines.simulated.logic.pace import Pace
from twinpool.worker.engines.simulated.logic.sequence import Fetch, Order, Token
from twinpool.worker.engines.simulated.logic.tiers import NOTHING, Tiers, TierSettings
from twinpool.worker.engines.simulated.shell.publisher import event_map

PACE = Pace(prefill_rate=1000.0)
SMALL = Limits(block_size=4, kv_blocks=16, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=64)
HOST = TierSettings("host", 40, 0.0, 1e12)
DISK = TierSettings("disk", 400, 0.001, 1e12)
SLOW = replace(HOST, bandwidth=1e3)
PROMPT = tuple(range(40))


def tiers(*settings: TierSettings, loading: str = "always") -> Tiers:
    return Tiers(settings, loading, prices=PACE.prices, block_size=4, block_bytes=PACE.transfer_bytes(1, 4))  # type: ignore[arg-type]


def answer(engine: Engine, prompt: tuple[int, ...], name: str = "o", now: float = 0.0) -> tuple[list[Token], float]:
    """Return the tokens and the seconds of one answer, loads included."""
    engine.submit(Order(name, prompt, 4, ignore_eos=True), now)
    tokens, begun = [], now
    while engine.unfinished:
        step, events = engine.begin(now)
        for event in events:
            if isinstance(event, Fetch):
                now += event.seconds
                engine.loaded(event.id)
        if step is not None:
            now += step.seconds
        tokens += [event for event in engine.end(now) if isinstance(event, Token)]
    return tokens, now - begun


def flooded(engine: Engine) -> Engine:
    """Let other prompts take all blocks of the accelerator."""
    for number in range(3):
        answer(engine, tuple(range(100 * (number + 1), 100 * (number + 1) + 40)), f"flood-{number}")
    assert engine.blocks.cached(engine_hashes(engine)) == []
    return engine


def engine_hashes(engine: Engine) -> list[int]:
    probe = Engine(engine.limits, engine.pace)
    probe.submit(Order("p", PROMPT, 1), 0.0)
    return probe._waiting[0].hashes


def value(engine: Engine, name: str, label: str = "") -> float:
    return engine.metrics.value(name, label)


def test_a_prompt_that_the_accelerator_forgot_is_loaded_and_answers_the_same() -> None:
    engine = Engine(SMALL, PACE, tiers=tiers(HOST))
    first, cold = answer(engine, PROMPT)
    again, warm = answer(flooded(engine), PROMPT, "again", 100.0)
    assert [token.token for token in again] == [token.token for token in first]
    assert again[0].cached == 36, "the last block holds the last token, which is computed"
    assert warm < cold
    assert value(engine, "prompt_tokens_cached_by_source", "host") == 36
    assert value(engine, "prompt_tokens_by_source", "external_kv_transfer") == 36
    assert value(engine, "external_prefix_cache_hits") == 36
    assert value(engine, "kv_offload_load_bytes") == 9 * PACE.transfer_bytes(1, 4)
    assert value(engine, "kv_offload_load_time") > 0
    assert engine.blocks.free == SMALL.kv_blocks


def test_a_further_tier_keeps_what_the_host_forgot_and_brings_it_back_there() -> None:
    engine = Engine(SMALL, PACE, tiers=tiers(replace(HOST, blocks=12), DISK))
    answer(engine, PROMPT)
    again, _ = answer(flooded(engine), PROMPT, "again", 100.0)
    assert again[0].cached == 36
    assert value(engine, "prompt_tokens_cached_by_source", "disk") == 36
    assert value(engine, "kv_offload_tiering_read_bytes", "1:fs") == 9 * PACE.transfer_bytes(1, 4)
    assert value(engine, "kv_offload_tiering_read_time", "1:fs") >= DISK.setup
    assert value(engine, "kv_offload_tiering_chunk_hits", "1:fs") == 9
    assert value(engine, "kv_offload_tiering_chunk_hits", "0:primary") == 0
    assert engine.tiers.evicted[0] > 0
    assert engine.tiers.evicted[1] == 0
    assert engine.tiers.find(engine_hashes(engine)[:9]) == [0] * 9


def test_a_tier_that_is_slower_than_computing_is_read_anyway_unless_it_is_priced() -> None:
    always = flooded_after_prompt(tiers(SLOW))
    priced = flooded_after_prompt(tiers(SLOW, loading="priced"))
    _, waited = answer(always, PROMPT, "again", 100.0)
    tokens, computed = answer(priced, PROMPT, "again", 100.0)
    assert waited > 10 * computed
    assert tokens[0].cached == 0
    assert value(priced, "kv_offload_load_bytes") == 0


def flooded_after_prompt(made: Tiers) -> Engine:
    engine = Engine(SMALL, PACE, tiers=made)
    answer(engine, PROMPT)
    return flooded(engine)


def test_loads_of_a_tier_wait_for_each_other() -> None:
    made = tiers(HOST)
    made.store([1, 2, 3, 4])
    first = made.choose(64, 0, [0, 0], now=0.0)
    made.begin(first, [1, 2], now=0.0)
    assert made.choose(64, 0, [0, 0], now=0.0).seconds == pytest.approx(2 * first.seconds)
    assert made.choose(64, 0, [0, 0], now=first.seconds).seconds == pytest.approx(first.seconds)
    assert made.choose(64, 0, [], now=0.0) == NOTHING


@given(stores=st.lists(st.lists(st.integers(0, 60), max_size=12, unique=True), max_size=30))
def test_no_tier_holds_more_than_its_room_and_each_block_enters_and_leaves_in_turn(stores: list[list[int]]) -> None:
    made = tiers(replace(HOST, blocks=5), replace(DISK, blocks=9))
    inside: set[int] = set()
    for hashes in stores:
        new, gone = made.store(hashes)
        for value_ in new:
            inside.add(value_)
        inside -= set(gone)
        assert len(inside) == made.blocks(0) <= 5
        assert made.blocks(1) <= 9
        assert all(made.find([value_]) for value_ in inside)


def test_an_order_that_ends_while_it_loads_frees_its_blocks() -> None:
    engine = flooded_after_prompt(tiers(HOST))
    engine.submit(Order("again", PROMPT, 4), 100.0)
    step, events = engine.begin(100.0)
    assert step is None
    (fetch,) = events
    assert isinstance(fetch, Fetch)
    assert value(engine, "num_requests_waiting") == 1
    engine.abort("again")
    engine.loaded("again")
    assert engine.blocks.free == SMALL.kv_blocks


def test_events_name_the_tier_as_vllm_does() -> None:
    engine = Engine(SMALL, PACE, tiers=tiers(replace(HOST, blocks=9)))
    answer(engine, PROMPT)
    events = flooded(engine).blocks.drained()
    host = [event for event in events if isinstance(event, Stored) and event.medium == "CPU"]
    assert event_map(host[0], 4)["medium"] == "CPU"
    assert event_map(host[0], 4)["token_ids"] == []
    gone = [event for event in events if isinstance(event, Removed) and event.medium == "CPU"]
    assert event_map(gone[0], 4) == {
        "type": "BlockRemoved",
        "block_hashes": [gone[0].hash],
        "medium": "CPU",
        "group_idx": 0,
    }


def test_flags_say_what_each_rank_has() -> None:
    block = 16 * 131072
    made = flags.parse(
        ["--model", "m", f"--host-kv-bytes={8 * block}", f"--disk-kv-bytes={80 * block}", "--data-parallel-size=2"]
    )
    assert [(tier.kind, tier.blocks) for tier in made.tiers] == [("host", 4), ("disk", 40)]
    assert made.loading == "always"
    assert flags.parse(["--model", "m", "--kv-load=priced"]).tiers == ()
    with pytest.raises(InvalidValue, match="needs --host-kv-bytes"):
        flags.parse(["--model", "m", "--disk-kv-bytes=100000000"])
    with pytest.raises(InvalidValue, match="no room for one block"):
        flags.parse(["--model", "m", "--host-kv-bytes=10"])


def test_a_fixed_prefill_speed_is_a_price_too() -> None:
    fixed = Pace(prefill_rate=1000.0).prices
    assert fixed.prefill(500, 10_000) == pytest.approx(0.5)
