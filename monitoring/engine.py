"""Dashboards: the engines behind the pool, and their caches."""

from __future__ import annotations

from monitoring.panel import POOL, RATE, Dashboard, Panel, Query, quantile, total

_PREFILL = POOL + ',component="prefill"'

ENGINE = Dashboard(
    "twinpool-engine",
    "Twinpool / Engine",
    "Engines pod by pod: batch, KV room, speed, and their lives. Simulated engines show invented numbers here.",
    (
        (
            "Load",
            (
                Panel(
                    "Running requests",
                    "Requests in the batch, by pod. Flat at one height while others wait: `max_num_seqs` is reached.",
                    "short",
                    (Query(f"sum by (pod) (vllm:num_requests_running{{{POOL}}})", "{{pod}}"),),
                ),
                Panel(
                    "Waiting requests",
                    "Requests that the engine has not begun, by pod. On one pod only: that pod is slow or chosen too "
                    "often. On all: add groups of that role.",
                    "short",
                    (Query(f"sum by (pod) (vllm:num_requests_waiting{{{POOL}}})", "{{pod}}"),),
                ),
                Panel(
                    "KV cache in use",
                    "Share of KV blocks in use, by pod. Near 100 % with preemptions: more memory for KV "
                    "(`--gpu-memory-utilization` in `engine.args`), shorter contexts, or more decode groups.",
                    "percentunit",
                    (Query(f"max by (pod) (vllm:kv_cache_usage_perc{{{POOL}}})", "{{pod}}"),),
                ),
                Panel(
                    "Preemptions",
                    "Requests per second thrown out of the batch for want of KV blocks; each is computed again. Should "
                    "be zero.",
                    "ops",
                    (Query(total("vllm:num_preemptions_total", "pod"), "{{pod}}"),),
                ),
            ),
        ),
        (
            "Speed",
            (
                Panel(
                    "Inter-token latency by pod, p99",
                    "A pod above the others of its role is hot or damaged: compare its running requests; if they are "
                    "even, look at its GPU's clocks and ECC errors.",
                    "s",
                    (Query(quantile(0.99, "vllm:inter_token_latency_seconds", "component, pod"), "{{pod}}"),),
                ),
                Panel(
                    "Tokens of a step, p99",
                    "How much one step of the engine computes. Near the token budget on prefill: it is compute bound. "
                    "On decode it is about the batch, and jumps when a prompt is read there.",
                    "short",
                    (Query(quantile(0.99, "vllm:iteration_tokens_total", "component"), "{{component}}"),),
                ),
                Panel(
                    "Tokens written",
                    "Tokens per second by pod. One pod below the others of its role gets less, or is slower.",
                    "ops",
                    (Query(total("vllm:generation_tokens_total", "pod"), "{{pod}}"),),
                ),
                Panel(
                    "Load of the busiest GPU's experts",
                    "Over the mean, as the engine's log tells it, beside what chance makes of even routing. Above it: "
                    "steps wait for that GPU; more copies (`decode.expertBalancing.redundantExperts`) or moves more "
                    "often (`interval`).",
                    "short",
                    (
                        Query(f"max by (pod) (twinpool_worker_expert_load_ratio{{{POOL}}})", "{{pod}}"),
                        Query(f"max(twinpool_worker_expert_load_noise_ratio{{{POOL}}})", "chance", wish=True),
                    ),
                    empty="a pool without expertBalancing tells nothing of its experts",
                ),
                Panel(
                    "How requests ended",
                    "Requests per second by reason: stop, length (the client's limit), abort (it left), error.",
                    "reqps",
                    (Query(total("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),),
                ),
            ),
        ),
        (
            "Lives",
            (
                Panel(
                    "Ready workers",
                    "Workers that may be asked, by role, as their launchers say.",
                    "short",
                    (Query(f"sum by (component) (twinpool_worker_ready{{{POOL}}})", "{{component}}"),),
                ),
                Panel(
                    "Engines lost, by cause",
                    "Losses within an hour. docs/worker-health.md says what each cause means; DeviceLost and DiskFull "
                    "need somebody at the node.",
                    "short",
                    (
                        Query(
                            f"sum by (cause) (increase(twinpool_worker_engine_losses_total{{{POOL}}}[1h]))", "{{cause}}"
                        ),
                    ),
                ),
                Panel(
                    "Time to start",
                    "From the start of an engine to its first token, the last start of each pod. Long: the model is "
                    "fetched anew each time; keep it on a volume (`podTemplate`). It is what scaling out waits for.",
                    "s",
                    (Query(f"max by (pod) (twinpool_worker_engine_start_seconds{{{POOL}}})", "{{pod}}"),),
                ),
                Panel(
                    "Warnings",
                    "Things that are wrong although the engine serves; `/status` of the pod's launcher names them.",
                    "short",
                    (Query(f"sum by (pod) (twinpool_worker_engine_warnings{{{POOL}}})", "{{pod}}"),),
                ),
            ),
        ),
    ),
)

CACHE = Dashboard(
    "twinpool-cache",
    "Twinpool / Cache",
    "How much of the prompts was already computed, and whether that made the first token come sooner.",
    (
        (
            "Prefix cache",
            (
                Panel(
                    "Share of prompt tokens found in the cache",
                    "By role. Low although prompts share a beginning: routing spreads them (`routing.policy: price` or "
                    "`prefix`), or the cache is too small and thrashes; then preemptions or evictions are high too.",
                    "percentunit",
                    (
                        Query(
                            f"{total('vllm:prefix_cache_hits_total', 'component')} "
                            f"/ ({total('vllm:prefix_cache_queries_total', 'component')} > 0)",
                            "{{component}}",
                        ),
                    ),
                ),
                Panel(
                    "Prompt tokens at prefill by source",
                    "Tokens per second that prefill computed, and that it had. Computed tokens are what prefill groups "
                    "are for: halving them is as good as doubling the groups.",
                    "ops",
                    (Query(total("vllm:prompt_tokens_by_source_total", "source", _PREFILL), "{{source}}"),),
                ),
                Panel(
                    "Time at prefill",
                    "Median and p99 from sending a prefill leg to its parameters. A falling median with a rising share "
                    "above: the cache pays. A cold and a warm hump show as a median far below p99.",
                    "s",
                    (
                        Query(quantile(0.5, "twinpool_router_prefill_leg_seconds"), "p50"),
                        Query(quantile(0.99, "twinpool_router_prefill_leg_seconds"), "p99"),
                    ),
                ),
            ),
        ),
        (
            "Tiers behind the accelerator (nothing in a role without kvCache.tiers)",
            (
                Panel(
                    "Prompt tokens found cached, by tier",
                    "Share of prompt tokens at prefill, by where they were: device is the accelerator, host and disk "
                    "are tiers behind it. A tier with a share near 0 is not worth its memory.",
                    "percentunit",
                    (
                        Query(
                            f"{total('vllm:prompt_tokens_cached_by_source_total', 'source', _PREFILL)} "
                            f"/ scalar({total('vllm:prompt_tokens_total', '', _PREFILL)} > 0)",
                            "{{source}}",
                        ),
                    ),
                ),
                Panel(
                    "Prompts that a cache served",
                    "Share of prefill legs whose prompt was cached in part, by any tier: hits of requests, beside hits "
                    "of tokens at the left. Many requests with few tokens share only a short beginning.",
                    "percentunit",
                    (
                        Query(
                            f'sum(rate(twinpool_router_prefill_by_cache_seconds_count{{{POOL},cache="warm"}}[{RATE}])) '
                            f"/ (sum(rate(twinpool_router_prefill_by_cache_seconds_count{{{POOL}}}[{RATE}])) > 0)",
                            "warm",
                        ),
                    ),
                ),
                Panel(
                    "Time at prefill, cold and warm",
                    "Median of a prefill leg whose prompt was not cached, and of one that was in part. Warm not below "
                    "cold: loading costs what it saves; `twinpool explain` names a tier that loses.",
                    "s",
                    (Query(quantile(0.5, "twinpool_router_prefill_by_cache_seconds", "cache"), "{{cache}}"),),
                ),
                Panel(
                    "Loading a token, and computing one",
                    "Since the engines' start. A tier above the line of computing loses time: remove it from "
                    "`prefill.kvCache.tiers`, or put it on something faster.",
                    "s",
                    (
                        Query(f"avg by (tier) (twinpool_worker_kv_tier_token_load_seconds{{{POOL}}})", "{{tier}}"),
                        Query(f"avg(twinpool_worker_kv_token_compute_seconds{{{POOL}}})", "computing"),
                    ),
                    empty="a pool without tiers has none",
                ),
                Panel(
                    "KV that gave way in a tier",
                    "Bytes per second. High with few hits of the tier: it is too small for what comes again; larger "
                    "(`size`), or none.",
                    "Bps",
                    (Query(total("twinpool_worker_kv_tier_evicted_bytes_total", "tier"), "{{tier}}"),),
                    empty="a pool without tiers has none",
                ),
            ),
        ),
        (
            "What routers know of caches by KV events (nothing in a pool that publishes none)",
            (
                Panel(
                    "Workers whose events are relied on",
                    "Share of workers, by role. Below 100 %: for the others routing estimates; `/admin/index` of the "
                    "router says why.",
                    "percentunit",
                    (Query(f"avg by (role) (twinpool_router_index_relied{{{POOL}}})", "{{role}}"),),
                ),
                Panel(
                    "Blocks that the index has room for",
                    "Share of each worker's cached blocks. Below 100 % hits are missed: give routers more memory.",
                    "percentunit",
                    (Query(f"min by (worker) (twinpool_router_index_coverage{{{POOL}}})", "{{worker}}"),),
                ),
                Panel(
                    "Losses in the events",
                    "Per second: asked for a replay, or reset because it brought too little. A steady rate: the "
                    "network or a router without CPU loses events.",
                    "ops",
                    (Query(total("twinpool_router_kv_event_gaps_total", "outcome"), "{{outcome}}"),),
                ),
                Panel(
                    "Foretold cached tokens, right and wrong",
                    "Predictions per second, against what engines report. Many wrong ones: the index and the engine "
                    "disagree; routing falls back to an estimate for that worker.",
                    "ops",
                    (Query(total("twinpool_router_index_predictions_total", "outcome"), "{{outcome}}"),),
                ),
            ),
        ),
    ),
)
