"""Metrics of vLLM that Twinpool's dashboards, alerts and ``twinpool explain`` read. vLLM declares them, not Twinpool.

Names, labels and meanings are those of vLLM 0.32 (``vllm/v1/metrics/loggers.py``, ``.../nixl/stats.py``); the simulated
engine gives the same names with invented values. ``python -m twinpool.localengine contract`` says what another version
lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinpool.core.metrics.declare import Kind


@dataclass(frozen=True)
class EngineMetric:
    """One metric of the engine: its name as it is exposed, its kind, what it means, its own labels."""

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()


METRICS = {
    metric.name: metric
    for metric in (
        EngineMetric("vllm:num_requests_running", "gauge", "Requests in the batch that is computed."),
        EngineMetric("vllm:num_requests_waiting", "gauge", "Requests that the engine has not begun."),
        EngineMetric("vllm:kv_cache_usage_perc", "gauge", "Share of the KV cache's blocks in use, 0 to 1."),
        EngineMetric("vllm:prompt_tokens_total", "counter", "Prompt tokens processed."),
        EngineMetric(
            "vllm:prompt_tokens_by_source_total",
            "counter",
            "Prompt tokens by where their KV came from: local_compute, local_cache_hit, external_kv_transfer.",
            ("source",),
        ),
        EngineMetric(
            "vllm:prompt_tokens_cached_by_source_total",
            "counter",
            "Prompt tokens found cached, by tier: device, host, disk (also a shared one), p2p, external_unspecified.",
            ("source",),
        ),
        EngineMetric("vllm:generation_tokens_total", "counter", "Tokens written."),
        EngineMetric("vllm:request_success_total", "counter", "Requests that ended, by reason.", ("finished_reason",)),
        EngineMetric(
            "vllm:num_preemptions_total", "counter", "Requests thrown out of the batch for want of KV blocks."
        ),
        EngineMetric("vllm:prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache."),
        EngineMetric("vllm:prefix_cache_hits_total", "counter", "Tokens found in the prefix cache."),
        EngineMetric("vllm:time_to_first_token_seconds", "histogram", "From arrival to the first token."),
        EngineMetric("vllm:inter_token_latency_seconds", "histogram", "Between two tokens of a request."),
        EngineMetric("vllm:request_queue_time_seconds", "histogram", "How long requests waited in the engine."),
        EngineMetric("vllm:e2e_request_latency_seconds", "histogram", "From arrival to the last token."),
        EngineMetric("vllm:iteration_tokens_total", "histogram", "Tokens computed in one step of the engine."),
        EngineMetric("vllm:nixl_xfer_time_seconds", "histogram", "How long the KV pull of one request took."),
        EngineMetric("vllm:nixl_bytes_transferred", "histogram", "Bytes of KV pulled for one request."),
        EngineMetric("vllm:nixl_num_failed_transfers_total", "counter", "KV pulls that failed."),
        EngineMetric(
            "vllm:nixl_num_kv_expired_reqs_total", "counter", "Handoffs whose KV prefill dropped before it was pulled."
        ),
    )
}
