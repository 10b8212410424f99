"""Dashboard: where a request waits between prefill and decode, and what the handoff costs."""

from __future__ import annotations

from monitoring.panel import POOL, Dashboard, Panel, Query, quantile, total

_PREFILL = POOL + ',component="prefill"'
_DECODE = POOL + ',component="decode"'
_STAGES = (
    ("1 queue at the router", "twinpool_router_queue_seconds", POOL),
    ("2 queue at prefill", "vllm:request_queue_time_seconds", _PREFILL),
    ("3 prefill, with its queue", "twinpool_router_prefill_leg_seconds", POOL),
    ("4 KV pull", "vllm:nixl_xfer_time_seconds", _DECODE),
    ("5 decode's first event, with pull", "twinpool_router_first_event_seconds", POOL + ',handoff="remote"'),
    ("6 between two tokens", "vllm:inter_token_latency_seconds", _DECODE),
)


def _stages(share: float) -> tuple[Query, ...]:
    return tuple(Query(quantile(share, metric, selector=selector), name) for name, metric, selector in _STAGES)


STAGES = Dashboard(
    "twinpool-prefill-decode",
    "Twinpool / Prefill and decode",
    "Where requests wait: router, prefill, transfer, decode. Which role is short, and whether the handoff pays.",
    (
        (
            "Where a request waits",
            (
                Panel(
                    "Stages, median",
                    "Time in each stage for half of the requests. Stages overlap as their names say, and percentiles "
                    "do not add up to the percentile of the whole. The highest of 1, 3, 5 is where to look first.",
                    "s",
                    _stages(0.5),
                ),
                Panel(
                    "Stages, p99",
                    "Time in each stage for the slowest hundredth. High where the median is low: bursts or one slow "
                    "worker (see Router, in flight by worker). 3 high: more prefill groups; 4 high: the network; 5 "
                    "high without 4: decode has no room for KV.",
                    "s",
                    _stages(0.99),
                ),
            ),
        ),
        (
            "Handoff",
            (
                Panel(
                    "KV bytes handed over",
                    "Bytes per second that decode workers pulled, by pod. Compare with what the network card carries; "
                    "above 60 % of it pulls begin to wait for each other: fewer handoffs (`handoff.conditional: "
                    "auto`), a smaller `--kv-cache-dtype`, or closer placement.",
                    "Bps",
                    (Query(total("vllm:nixl_bytes_transferred_sum", "pod", _DECODE), "{{pod}}"),),
                ),
                Panel(
                    "Speed of a pull",
                    "Bytes over the time that pulls took, by decode pod. One pod far below the others has a bad link; "
                    "all below what the hardware promises: wrong network interface, see docs/preflight.md.",
                    "Bps",
                    (
                        Query(
                            f"{total('vllm:nixl_bytes_transferred_sum', 'pod', _DECODE)} "
                            f"/ ({total('vllm:nixl_xfer_time_seconds_sum', 'pod', _DECODE)} > 0)",
                            "{{pod}}",
                        ),
                    ),
                ),
                Panel(
                    "Handoffs by outcome",
                    "Requests per second: remote (prefilled elsewhere), local (decode read the prompt itself, and "
                    "why), failed. Many local ones with reason auto: prefill is too busy to pay for the handoff.",
                    "reqps",
                    (Query(total("twinpool_router_handoffs_total", "outcome, reason"), "{{outcome}} {{reason}}"),),
                ),
                Panel(
                    "First event, remote beside local",
                    "p99 from sending a decode leg to its first event. Remote above local at the same time: the pull "
                    "costs more than reading the prompt again; think about `handoff.conditional: auto`.",
                    "s",
                    (Query(quantile(0.99, "twinpool_router_first_event_seconds", "handoff"), "{{handoff}}"),),
                ),
                Panel(
                    "Handoffs that were not pulled yet",
                    "Prefilled requests whose KV still lies at prefill, by worker. Growing: decode is full. They "
                    "expire after 30 s, and their prompt is then read again.",
                    "short",
                    (Query(f"sum by (worker) (twinpool_router_handoffs_unpulled{{{POOL}}})", "{{worker}}"),),
                ),
                Panel(
                    "Failed pulls and expired handoffs",
                    "Per second. Failed: the network or a worker that went; the request is prefilled again. Expired: "
                    "decode came too late. Both should be zero.",
                    "ops",
                    (
                        Query(total("vllm:nixl_num_failed_transfers_total"), "failed"),
                        Query(total("vllm:nixl_num_kv_expired_reqs_total"), "expired"),
                    ),
                ),
            ),
        ),
        (
            "Which role is short",
            (
                Panel(
                    "Requests that wait in the engines",
                    "Requests that engines have not begun, by role. Only prefill waits: more prefill groups; only "
                    "decode: more decode groups. Both: the pool is too small.",
                    "short",
                    (Query(f"sum by (component) (vllm:num_requests_waiting{{{POOL}}})", "{{component}}"),),
                ),
                Panel(
                    "Prompt tokens at decode by source",
                    "Tokens per second that came by transfer, were in the cache, or that decode computed itself. Many "
                    "computed ones slow the answers of everyone on that worker.",
                    "ops",
                    (Query(total("vllm:prompt_tokens_by_source_total", "source", _DECODE), "{{source}}"),),
                ),
            ),
        ),
    ),
)
