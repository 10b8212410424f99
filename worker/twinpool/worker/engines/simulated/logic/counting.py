"""What the engine counts of a prompt: where its tokens came from, when it is placed and when its first token is out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.worker.engines.simulated.logic.tiers import SOURCES, Load, Tiers

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from twinpool.worker.engines.simulated.logic.metrics import Metrics
    from twinpool.worker.engines.simulated.logic.sequence import Sequence


def placed(metrics: Metrics, sequence: Sequence, tiers: Tiers) -> None:
    """Count a sequence that was given blocks for the first time, of which ``sequence.cached`` tokens were there."""
    length, hits = len(sequence.tokens), sequence.cached
    metrics.add("prefix_cache_queries", length)
    metrics.add("prefix_cache_hits", hits)
    metrics.add("prompt_tokens_cached_by_source", hits, "device")
    if sequence.remote is not None:
        found = {"p2p": length - hits}
    elif len(tiers):
        found = {}
        for tier, blocks in sequence.load.runs:
            source = SOURCES[tiers.settings[tier].kind]
            found[source] = found.get(source, 0) + blocks * tiers.block_size
    else:
        return
    metrics.add("external_prefix_cache_queries", length - hits)
    metrics.add("external_prefix_cache_hits", sum(found.values()))
    for source, tokens in found.items():
        metrics.add("prompt_tokens_cached_by_source", tokens, source)


def looked_up(metrics: Metrics, tiers: Tiers, asked: int, found: Many[int]) -> None:
    """Count a look for ``asked`` blocks, of which the first ones were ``found`` in these tiers; a miss ends it."""
    if len(tiers) < 2:
        return
    missed = 1 if len(found) < asked else 0
    for tier in range(len(tiers)):
        metrics.add("kv_offload_tiering_chunk_queries", missed + sum(each >= tier for each in found), tiers.label(tier))
        metrics.add("kv_offload_tiering_chunk_hits", sum(each == tier for each in found), tiers.label(tier))


def loaded(metrics: Metrics, tiers: Tiers, load: Load) -> None:
    """Count a load: all of it comes from the host to the accelerator, some of it from further tiers to the host."""
    metrics.add("kv_offload_load_bytes", load.blocks * tiers.block_bytes)
    metrics.add("kv_offload_load_time", sum(_seconds(tiers, 0, blocks) for _, blocks in load.runs))
    for tier, blocks in load.runs:
        if tier:
            metrics.add("kv_offload_tiering_read_bytes", blocks * tiers.block_bytes, tiers.label(tier))
            metrics.add("kv_offload_tiering_read_time", _seconds(tiers, tier, blocks), tiers.label(tier))


def _seconds(tiers: Tiers, tier: int, blocks: int) -> float:
    """Return the seconds that ``blocks`` take over the link of one tier alone."""
    settings = tiers.settings[tier]
    return settings.setup + blocks * tiers.block_bytes / settings.bandwidth


def stored(metrics: Metrics, tiers: Tiers, blocks: int) -> None:
    """Count blocks that are new to the host's memory, from where they go on to every further tier."""
    size = blocks * tiers.block_bytes
    metrics.add("kv_offload_store_bytes", size)
    for tier in range(1, len(tiers)):
        metrics.add("kv_offload_tiering_write_bytes", size, tiers.label(tier))


def first_token(metrics: Metrics, sequence: Sequence, now: float) -> None:
    """Count a prompt whose first token is out."""
    prompt = len(sequence.order.prompt)
    computed = prompt - sequence.cached - sequence.external
    metrics.observe("time_to_first_token_seconds", now - sequence.arrived)
    metrics.add("prompt_tokens", prompt)
    by_source = (
        ("local_compute", computed),
        ("local_cache_hit", sequence.cached),
        ("external_kv_transfer", sequence.external),
    )
    for source, count in by_source:
        metrics.add("prompt_tokens_by_source", count, source)
    began = sequence.arrived if sequence.running_since is None else sequence.running_since
    metrics.observe("request_prefill_time_seconds", now - began)
    metrics.observe("request_prefill_kv_computed_tokens", computed)
