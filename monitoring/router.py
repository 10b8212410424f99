"""Dashboard: the endpoint, its queue, and how it spreads work over workers."""

from __future__ import annotations

from monitoring.panel import POOL, Dashboard, Panel, Query, percentiles, total

ROUTER = Dashboard(
    "twinpool-router",
    "Twinpool / Router",
    "The endpoint: clients, queue, how work is spread over workers, and which workers fail.",
    (
        (
            "Clients",
            (
                Panel(
                    "Open connections",
                    "Client connections by router pod. One pod far above the others: clients keep connections for "
                    "long; routers even this out within themselves, a Service does not between pods.",
                    "short",
                    (Query(f"sum by (pod) (twinpool_router_clients{{{POOL}}})", "{{pod}}"),),
                ),
                Panel(
                    "Requests by route",
                    "Requests per second by path. `other` is what no client of this API should ask for.",
                    "reqps",
                    (Query(total("twinpool_router_requests_total", "route"), "{{route}}"),),
                ),
                Panel(
                    "Clients that left",
                    "Per second, by where their request was. Many in queued or prefill: clients' time-outs are shorter "
                    "than what the pool takes; compare them with p99 of the first token.",
                    "ops",
                    (Query(total("twinpool_router_client_aborts_total", "phase"), "{{phase}}"),),
                ),
            ),
        ),
        (
            "Queue",
            (
                Panel(
                    "First token: observed over foretold",
                    "Time to the first token over what was foretold of it, with `routing.policy: price` or "
                    "`handoff.conditional: auto`. A median near 1 is right; far from it for long: times are priced "
                    "wrongly; `/admin/ledger` of the router says of which part and worker. A p99 far above it: stalls.",
                    "short",
                    percentiles("twinpool_router_ttft_prediction_ratio"),
                ),
                Panel(
                    "Time in the queue",
                    "How long requests waited for a place at the workers; up to 1 ms means not at all. A p99 of "
                    "seconds with a median of none: bursts. A median of more: add groups, a larger `routing.queue` "
                    "only hides it.",
                    "s",
                    percentiles("twinpool_router_queue_seconds"),
                ),
                Panel(
                    "Turned away",
                    "Requests per second that got no place: full (429) or timeout (504). Should be zero; if not, add "
                    "groups or let clients retry after Retry-After.",
                    "reqps",
                    (Query(total("twinpool_router_turned_away_total", "reason"), "{{reason}}"),),
                ),
            ),
        ),
        (
            "Workers",
            (
                Panel(
                    "In flight by worker",
                    "Requests that each worker has to finish. Lines of one role should lie together; one that climbs "
                    "alone is slow: look at its engine's dashboard and its GPU.",
                    "short",
                    (Query(f"sum by (role, worker) (twinpool_router_requests_in_flight{{{POOL}}})", "{{worker}}"),),
                ),
                Panel(
                    "Tokens in flight by worker",
                    "Estimated tokens of those requests: the work behind the count. Apart while requests are even: "
                    "long prompts meet one worker; prefix routing or a hot prefix.",
                    "short",
                    (Query(f"sum by (role, worker) (twinpool_router_tokens_in_flight{{{POOL}}})", "{{worker}}"),),
                ),
                Panel(
                    "Workers that may be chosen",
                    "Workers that routers admit, by role, the least over routers. Below the groups that exist: probes "
                    "fail or a pod is not ready; `/admin/endpoints` of the router says why.",
                    "short",
                    (
                        Query(
                            f"min by (role) (sum by (role, pod) (twinpool_router_endpoint_admitted{{{POOL}}}))",
                            "{{role}}",
                        ),
                    ),
                ),
                Panel(
                    "Failures and retries",
                    "Legs per second that failed, by role and kind, and those sent again. connect or lost: pods that "
                    "die; timeout and stall: engines that hang; status: engines that answer 5xx.",
                    "ops",
                    (
                        Query(total("twinpool_router_worker_failures_total", "role, kind"), "{{role}} {{kind}}"),
                        Query(total("twinpool_router_retries_total", "role"), "{{role}} sent again"),
                    ),
                ),
                Panel(
                    "Workers avoided after failures",
                    "Data processes that avoid a worker for a while. One worker avoided by all: its launcher's "
                    "`/status` says what its engine last printed.",
                    "short",
                    (Query(f"sum by (worker) (twinpool_router_endpoint_suspect{{{POOL}}})", "{{worker}}"),),
                    empty="series exist only while a worker is avoided",
                ),
            ),
        ),
        (
            "The router itself",
            (
                Panel(
                    "Discovery, restarts, lost log lines",
                    "synced is 1 while the list of workers follows the API server, the least over routers. Restarts of "
                    "data processes are bugs: report them with the router's log. Lost lines: whoever reads the access "
                    "log is too slow.",
                    "short",
                    (
                        Query(f"min(twinpool_router_discovery_synced{{{POOL}}})", "synced"),
                        Query(total("twinpool_router_data_process_restarts_total"), "restarts per second"),
                        Query(total("twinpool_router_access_log_dropped_total"), "lost log lines per second"),
                    ),
                ),
            ),
        ),
    ),
)
