"""What a router counts: in its data processes, added up and written out by its control process."""

from __future__ import annotations

from twinpool.core.metrics.declare import Label, Metric, catalogue

_SHELL = "router/twinpool/router/shell"
#: Upper bounds in seconds: 1 ms to 131 s, doubling.
SECONDS = tuple(0.001 * 2**n for n in range(18))

_ROLE = Label("role", "prefill or decode", 2)
_WORKER = (Label("worker", "name of the worker's pod", 1, "workers"), _ROLE)
_RANK = Label("rank", "data-parallel rank, 0 without parallelism.data", 64)
_ROUTE = Label("route", "path of the API, or other", 16)
_ROLES = (("prefill",), ("decode",))

METRICS = catalogue(
    (
        Metric(
            "twinpool_router_requests_total",
            "counter",
            "Requests by route and status (499: client left).",
            f"{_SHELL}/client.py",
            labels=(_ROUTE, Label("code", "HTTP status", 24)),
        ),
        Metric(
            "twinpool_router_handoffs_total",
            "counter",
            "Requests that could be split: remote (prefilled elsewhere), local (decode did it all, and why) or failed.",
            f"{_SHELL}/exchange.py",
            labels=(Label("outcome", "remote, local or failed", 3), Label("reason", "why not remote; else empty", 16)),
            preset=(("remote", ""),),
        ),
        Metric(
            "twinpool_router_retries_total",
            "counter",
            "Legs sent again to another worker.",
            f"{_SHELL}/exchange.py",
            labels=(_ROLE,),
            preset=_ROLES,
        ),
        Metric(
            "twinpool_router_worker_failures_total",
            "counter",
            "Legs that failed: connect, lost (connection), status (5xx), timeout (no first token), stall (mid-answer).",
            f"{_SHELL}/pool.py",
            labels=(_ROLE, Label("kind", "connect, lost, status, timeout or stall", 8)),
            preset=(
                *((role, kind) for (role,) in _ROLES for kind in ("connect", "lost", "status", "timeout")),
                ("decode", "stall"),
            ),
        ),
        Metric(
            "twinpool_router_client_aborts_total",
            "counter",
            "Clients that left before their answer's end.",
            f"{_SHELL}/exchange.py",
            labels=(Label("phase", "where their request was: queued, prefill, connect, wait, relay", 8),),
            preset=tuple((phase,) for phase in ("queued", "prefill", "connect", "wait", "relay")),
        ),
        Metric(
            "twinpool_router_broken_streams_total",
            "counter",
            "Answers cut by a worker's death.",
            f"{_SHELL}/exchange.py",
        ),
        Metric(
            "twinpool_router_continuations_total",
            "counter",
            "Streams that lost their worker and went on (routing.continuation): resumed at another one, finished (only "
            "the end was missing) or failed.",
            f"{_SHELL}/exchange.py",
            labels=(Label("outcome", "resumed, finished or failed", 3),),
            preset=(("resumed",), ("finished",), ("failed",)),
        ),
        Metric(
            "twinpool_router_turned_away_total",
            "counter",
            "Requests that got no place at the workers: full or limit (HTTP 429), timeout (504), unserved (503, held).",
            f"{_SHELL}/admission.py",
            labels=(Label("reason", "full, limit (of an API key), timeout or unserved", 4),),
            preset=(("full",), ("limit",), ("timeout",), ("unserved",)),
        ),
        Metric(
            "twinpool_router_queue_seconds",
            "histogram",
            "Time that requests waited for a place at the workers; 0 for those that began at once.",
            f"{_SHELL}/admission.py",
            "seconds",
            buckets=SECONDS,
        ),
        Metric(
            "twinpool_router_requests_waiting",
            "gauge",
            "Requests that wait for a place at the workers.",
            f"{_SHELL}/dataplane.py",
        ),
        Metric(
            "twinpool_router_requests_held",
            "gauge",
            "Those of the waiting requests that wait for a worker to come, because none serves.",
            f"{_SHELL}/dataplane.py",
        ),
        Metric(
            "twinpool_router_key_requests_total",
            "counter",
            "Requests by name of the client's API key.",
            f"{_SHELL}/client.py",
            labels=(Label("key", "name of the key in the Secret of routing.auth", 1, "keys"),),
        ),
        Metric(
            "twinpool_router_key_tokens_total",
            "counter",
            "Tokens that they asked for, as limits count them: prompts by their bytes, answers by their limit.",
            f"{_SHELL}/client.py",
            labels=(Label("key", "name of the key in the Secret of routing.auth", 1, "keys"),),
        ),
        Metric(
            "twinpool_router_time_to_first_token_seconds",
            "histogram",
            "Time from a complete request to the first byte of the answer's body.",
            f"{_SHELL}/record.py",
            "seconds",
            labels=(_ROUTE,),
            buckets=SECONDS,
        ),
        Metric(
            "twinpool_router_first_event_seconds",
            "histogram",
            "Time from sending a decode leg to the first byte of its answer: remote (KV pulled first) or local.",
            f"{_SHELL}/record.py",
            "seconds",
            labels=(Label("handoff", "remote or local", 2), _WORKER[0]),
            buckets=SECONDS,
        ),
        Metric(
            "twinpool_router_inter_token_seconds",
            "histogram",
            "Mean time between two events of a stream, one value for each stream: (last - first) / (events - 1).",
            f"{_SHELL}/record.py",
            "seconds",
            labels=(_WORKER[0],),
            buckets=SECONDS,
        ),
        Metric(
            "twinpool_router_access_log_dropped_total",
            "counter",
            "Lines of the access log that nobody took.",
            f"{_SHELL}/access.py",
        ),
        Metric(
            "twinpool_router_prefill_leg_seconds",
            "histogram",
            "Time from sending a prefill leg to its parameters.",
            f"{_SHELL}/legs.py",
            "seconds",
            labels=(_WORKER[0],),
            buckets=SECONDS,
        ),
        Metric(
            "twinpool_router_prefill_by_cache_seconds",
            "histogram",
            "Time of a prefill leg whose prompt was cached in part (warm) or not at all (cold), on the accelerator or "
            "in a slower tier; its counts are how many requests a cache served.",
            f"{_SHELL}/pool.py",
            "seconds",
            labels=(Label("cache", "cold or warm", 2),),
            buckets=SECONDS,
        ),
        Metric(
            "twinpool_router_prefill_prediction_ratio",
            "histogram",
            "Time of a prefill leg over that which routing.policy price or handoff.conditional auto expected of it; "
            "far from 1 for long, choices are made on wrong times.",
            f"{_SHELL}/pool.py",
            labels=(_WORKER[0],),
            buckets=SECONDS,
        ),
        Metric(
            "twinpool_router_ttft_prediction_ratio",
            "histogram",
            "Time from a place at the workers to the first token of a stream, over that which was foretold of it: "
            "prefill and its queue, pull, first step. Only where times are priced; what comes corrects the model.",
            f"{_SHELL}/record.py",
            labels=(Label("handoff", "remote (KV pulled) or local (decode did it all)", 2),),
            preset=(("remote",), ("local",)),
            buckets=SECONDS,
        ),
        Metric(
            "twinpool_router_requests_in_flight",
            "gauge",
            "Legs that a worker has to finish.",
            f"{_SHELL}/control.py",
            labels=_WORKER,
        ),
        Metric(
            "twinpool_router_tokens_in_flight",
            "gauge",
            "Estimated tokens of those legs.",
            f"{_SHELL}/control.py",
            labels=_WORKER,
        ),
        Metric(
            "twinpool_router_handoffs_unpulled",
            "gauge",
            "Prefilled handoffs with KV not pulled.",
            f"{_SHELL}/control.py",
            labels=_WORKER,
        ),
        Metric(
            "twinpool_router_endpoint_admitted",
            "gauge",
            "1 when requests may be sent to the worker.",
            f"{_SHELL}/control.py",
            labels=_WORKER,
        ),
        Metric(
            "twinpool_router_endpoint_suspect",
            "gauge",
            "Data processes that avoid the worker after failures.",
            f"{_SHELL}/dataplane.py",
            labels=_WORKER,
        ),
        Metric(
            "twinpool_router_index_relied",
            "gauge",
            "1 while routing relies on the worker's KV events; 0: on an estimate (/admin/index says why).",
            f"{_SHELL}/events.py",
            labels=(*_WORKER, _RANK),
        ),
        Metric(
            "twinpool_router_index_coverage",
            "gauge",
            "Share of the worker's cached blocks that the index has room for; below 1 hits are missed.",
            f"{_SHELL}/events.py",
            labels=(*_WORKER, _RANK),
        ),
        Metric(
            "twinpool_router_index_blocks",
            "gauge",
            "KV blocks that the worker has by its events.",
            f"{_SHELL}/events.py",
            labels=(*_WORKER, _RANK),
        ),
        Metric(
            "twinpool_router_kv_event_gaps_total",
            "counter",
            "Losses in the worker's KV events: asked (for a replay) or reset (it brought too little).",
            f"{_SHELL}/events.py",
            labels=(_WORKER[0], _RANK, Label("outcome", "asked or reset", 2)),
        ),
        Metric(
            "twinpool_router_index_predictions_total",
            "counter",
            "Cached tokens foretold by KV events, against those that the engine reports: right or wrong (by a block).",
            f"{_SHELL}/pool.py",
            labels=(_WORKER[0], _RANK, Label("outcome", "right or wrong", 2)),
        ),
        Metric(
            "twinpool_router_index_questions_total",
            "counter",
            "Prompts of token ids looked up by KV events: answered, or late (routed by the estimate).",
            f"{_SHELL}/locator.py",
            labels=(Label("outcome", "answered or late", 2),),
            preset=(("answered",), ("late",)),
        ),
        Metric(
            "twinpool_router_renders_total",
            "counter",
            "Prompts that routing.renderer was to turn into token ids: rendered; else routed by the estimate: late, "
            "failed, busy (or all renderers failed lately), unusable (not text alone, or refused), dropped (client "
            "left).",
            f"{_SHELL}/rendering.py",
            labels=(Label("outcome", "rendered, late, failed, busy, unusable or dropped", 6),),
            preset=tuple((outcome,) for outcome in ("rendered", "late", "failed", "busy", "unusable", "dropped")),
        ),
        Metric(
            "twinpool_router_render_seconds",
            "histogram",
            "Time that a request waited for the token ids of its prompt, where they came.",
            f"{_SHELL}/rendering.py",
            "seconds",
            buckets=SECONDS,
        ),
        Metric(
            "twinpool_router_render_checks_total",
            "counter",
            "Prompts whose tokens an engine read like the renderer: right, or wrong, after which nothing is rendered "
            "for ten minutes and the pool's condition Rendering says so.",
            f"{_SHELL}/rendering.py",
            labels=(Label("outcome", "right or wrong", 2),),
            preset=(("right",), ("wrong",)),
        ),
        Metric(
            "twinpool_router_renderers",
            "gauge",
            "Renderers that may be asked: they answer, and every worker is of their revision.",
            f"{_SHELL}/control.py",
        ),
        Metric(
            "twinpool_router_rank_choices_total",
            "counter",
            "Legs to workers with data-parallel ranks, by who chose the rank: router (for its cache) or engine.",
            f"{_SHELL}/pool.py",
            labels=(_ROLE, Label("by", "router or engine", 2)),
        ),
        Metric("twinpool_router_clients", "gauge", "Open client connections.", f"{_SHELL}/dataplane.py"),
        Metric(
            "twinpool_router_data_process_restarts_total",
            "counter",
            "Data processes replaced.",
            f"{_SHELL}/children.py",
        ),
        Metric(
            "twinpool_router_discovery_synced",
            "gauge",
            "1 while the list of workers follows its source.",
            f"{_SHELL}/control.py",
        ),
    )
)
