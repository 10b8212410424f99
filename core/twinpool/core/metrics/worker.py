"""What a launcher says of the engine that it looks after. Standard library only, like the launcher itself."""

from __future__ import annotations

from twinpool.core.metrics.declare import Label, Metric, catalogue

_MADE = "worker/twinpool/worker/logic/report.py"
_COLLECTIVE = (
    Label("collective", "all-reduce or all-to-all", 4),
    Label("bytes", "size of the message, one of a few fixed ones", 16),
)
_TIER = Label("tier", "host, disk or shared", 3)

METRICS = catalogue(
    (
        Metric(
            "twinpool_worker_info",
            "gauge",
            "What this worker runs.",
            _MADE,
            labels=(
                Label("engine", "vllm or simulated", 2),
                Label("model", "name of the model", 1),
                Label("role", "prefill or decode", 2),
                Label("version", "version of Twinpool", 1),
            ),
        ),
        Metric("twinpool_worker_ready", "gauge", "1 when requests may come.", _MADE),
        Metric(
            "twinpool_worker_phase",
            "gauge",
            "1 for the phase of the engine's life that the worker is in.",
            _MADE,
            labels=(Label("phase", "phases of the launcher, as on /status", 16),),
        ),
        Metric("twinpool_worker_engine_epoch", "gauge", "Number of the engine's current start.", _MADE),
        Metric(
            "twinpool_worker_engine_restarts_total",
            "counter",
            "Engines restarted in place because their process ended or served no more.",
            _MADE,
        ),
        Metric(
            "twinpool_worker_engine_losses_total",
            "counter",
            "Engines lost, by cause; docs/worker-health.md says what each means and what helps.",
            _MADE,
            labels=(Label("cause", "one of the causes in docs/worker-health.md", 16),),
        ),
        Metric(
            "twinpool_worker_engine_warnings",
            "gauge",
            "Things that are wrong although the engine serves; /status names them.",
            _MADE,
        ),
        Metric(
            "twinpool_worker_weights_bytes",
            "gauge",
            "Bytes of the model's files that are there, or that were checked, before the engine starts; they stand "
            "still when the download does.",
            _MADE,
        ),
        Metric(
            "twinpool_worker_weights_total_bytes",
            "gauge",
            "Bytes of the model's files in all; 0 while that is not known.",
            _MADE,
        ),
        Metric(
            "twinpool_worker_engine_start_seconds",
            "gauge",
            "Time from the start of the engine to its probe token, last start.",
            _MADE,
            "seconds",
        ),
        Metric(
            "twinpool_worker_preflight_outcome",
            "gauge",
            "1 for how the last preflight ended; /preflight says why.",
            _MADE,
            labels=(Label("outcome", "passed, failed, unfinished or skipped", 4),),
        ),
        Metric(
            "twinpool_worker_preflight_bus_bandwidth_bytes_per_second",
            "gauge",
            "What each link must have carried in a collective over the group; compare with what the hardware promises.",
            _MADE,
            "bytes_per_second",
            labels=_COLLECTIVE,
        ),
        Metric(
            "twinpool_worker_preflight_collective_seconds",
            "gauge",
            "Median time of a collective over the group.",
            _MADE,
            "seconds",
            labels=_COLLECTIVE,
        ),
        Metric(
            "twinpool_worker_preflight_slowest_link_bytes_per_second",
            "gauge",
            "Bandwidth of the slowest pair of ranks; /preflight names it.",
            _MADE,
            "bytes_per_second",
        ),
        Metric(
            "twinpool_worker_speculation_acceptance_ratio",
            "gauge",
            "Share of drafts whose token at this position was kept with all before it, since the engine's start; "
            "positions near 0 are not worth drafting.",
            _MADE,
            labels=(Label("position", "place in the draft, from 0", 32),),
        ),
        Metric(
            "twinpool_worker_speculation_tokens_per_step",
            "gauge",
            "Tokens of a step that checked a draft, since the engine's start; 1: drafts win nothing.",
            _MADE,
        ),
        Metric(
            "twinpool_worker_kv_tier_size_bytes",
            "gauge",
            "Size of each KV tier behind the accelerator.",
            _MADE,
            "bytes",
            labels=(_TIER,),
        ),
        Metric(
            "twinpool_worker_kv_tier_evicted_bytes_total",
            "counter",
            "KV that gave way to newer in a tier; of the host's memory, what was stored there beyond its size. Much of "
            "it with few hits: the tier is too small for what comes again, or nothing does.",
            _MADE,
            "bytes",
            labels=(_TIER,),
        ),
        Metric(
            "twinpool_worker_kv_tier_token_load_seconds",
            "gauge",
            "Time to bring one token back from a tier, since the engine's start; above "
            "twinpool_worker_kv_token_compute_seconds the tier loses time.",
            _MADE,
            "seconds",
            labels=(_TIER,),
        ),
        Metric(
            "twinpool_worker_kv_token_compute_seconds",
            "gauge",
            "Time to compute one prompt token, since the engine's start; prompts that share a step are counted for all "
            "of it each. Told by workers with KV tiers that read prompts.",
            _MADE,
            "seconds",
        ),
        Metric(
            "twinpool_worker_expert_load_ratio",
            "gauge",
            "Load of the GPU with the busiest experts over the mean, in the last steps that the engine told of; steps "
            "wait for it. Told with expertBalancing.",
            _MADE,
        ),
        Metric(
            "twinpool_worker_expert_load_noise_ratio",
            "gauge",
            "What chance makes of twinpool_worker_expert_load_ratio when routing is even, at the same loads.",
            _MADE,
        ),
        Metric(
            "twinpool_worker_expert_load_significant",
            "gauge",
            "1 when experts are busier than chance makes them; 0: nothing should be moved for it.",
            _MADE,
        ),
    )
)
