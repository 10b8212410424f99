"""Dashboard: does the pool keep its objectives, and with how many groups."""

from __future__ import annotations

from monitoring.panel import OPERATOR_POOL, POOL, Dashboard, Panel, Query, percentiles, total


def _objective(kind: str) -> Query:
    return Query(
        f'max(twinpool_operator_pool_objective_seconds{{{OPERATOR_POOL},objective="{kind}"}})',
        "objective (p99)",
        wish=True,
    )


_COMPUTED = POOL + ',source="local_compute"'
_SERVER_ERRORS = POOL + ',code=~"5.."'
_GROUPS = f"twinpool_operator_pool_groups{{{OPERATOR_POOL}"

OVERVIEW = Dashboard(
    "twinpool-overview",
    "Twinpool / Overview",
    "Does a pool answer, does it keep its objectives, and with how many groups. Begin here.",
    (
        (
            "Objectives",
            (
                Panel(
                    "Time to first token",
                    "From a complete request to the first byte of its answer, at the routers. Read p99 against the "
                    "objective's line. Above it: open Prefill and decode, or ask `twinpool explain POOL`.",
                    "s",
                    (*percentiles("twinpool_router_time_to_first_token_seconds"), _objective("ttft")),
                ),
                Panel(
                    "Inter-token latency",
                    "Mean time between two events of a stream, a value for each stream. p99 above the objective: "
                    "decode batches are too large, or decode groups read long prompts themselves; add decode groups.",
                    "s",
                    (*percentiles("twinpool_router_inter_token_seconds"), _objective("itl")),
                ),
            ),
        ),
        (
            "Requests",
            (
                Panel(
                    "Requests by status",
                    "Requests per second by HTTP status, at the routers. 429: the queue was full; 503: nobody served; "
                    "499: clients left first. Growing 5xx: open Router.",
                    "reqps",
                    (Query(total("twinpool_router_requests_total", "code"), "{{code}}"),),
                ),
                Panel(
                    "Share of requests that failed",
                    "Answers with status 5xx, and streams cut in the middle, as a share of all requests. Above 1 % for "
                    "minutes: the alert's runbook lists what to look at.",
                    "percentunit",
                    (
                        Query(
                            f"({total('twinpool_router_requests_total', selector=_SERVER_ERRORS)} or vector(0)) "
                            f"/ {total('twinpool_router_requests_total')}",
                            "5xx",
                        ),
                        Query(
                            f"{total('twinpool_router_broken_streams_total')} "
                            f"/ {total('twinpool_router_requests_total')}",
                            "cut streams",
                        ),
                    ),
                ),
                Panel(
                    "Tokens",
                    "Prompt tokens that engines computed and tokens that they wrote, per second. Written ones flat "
                    "while requests queue: decode is at its limit; computed ones flat: prefill is. With simulated "
                    "engines the numbers are invented.",
                    "ops",
                    (
                        Query(
                            total("vllm:prompt_tokens_by_source_total", "component", _COMPUTED),
                            "computed by {{component}}",
                        ),
                        Query(total("vllm:generation_tokens_total", "component"), "written by {{component}}"),
                    ),
                ),
                Panel(
                    "Requests that wait at the routers",
                    "Requests that have no place at the workers yet. Steadily above zero: the pool is too small for "
                    "what arrives, or `routing.queue` holds back more than it must.",
                    "short",
                    (Query(f"sum(twinpool_router_requests_waiting{{{POOL}}})", "waiting"),),
                ),
            ),
        ),
        (
            "Groups",
            (
                Panel(
                    "Routable and wanted groups",
                    "Groups that serve beside those wanted, by role. Apart for long: `kubectl describe tpool` says in "
                    "the conditions Placed and Progressing what is missing.",
                    "short",
                    (
                        Query(f'sum by (role) ({_GROUPS},state="routable"}})', "{{role}} routable"),
                        Query(f'sum by (role) ({_GROUPS},state="desired"}})', "{{role}} wanted", wish=True),
                    ),
                ),
                Panel(
                    "Prefill groups per decode group",
                    "The P:D ratio now and as wanted. Apart outside of a rollout or scaling: one role does not get its "
                    "groups. Which ratio is right depends on prompt and answer lengths: see Prefill and decode.",
                    "short",
                    tuple(
                        Query(
                            f'sum({_GROUPS},role="prefill",state="{state}"}}) '
                            f'/ sum({_GROUPS},role="decode",state="{state}"}})',
                            legend,
                            wish=legend == "wanted",
                        )
                        for state, legend in (("routable", "now"), ("desired", "wanted"))
                    ),
                ),
                Panel(
                    "GPUs",
                    "GPUs that the existing groups ask for, by role. Compare with your quota before you add groups.",
                    "short",
                    (Query(f"sum by (role) (twinpool_operator_pool_gpus{{{OPERATOR_POOL}}})", "{{role}}"),),
                ),
                Panel(
                    "Conditions",
                    "What the pool says of itself now, with reasons. Anything but True in Ready, Placed or Routable "
                    "that stays: `kubectl describe tpool` has the cause and the next step.",
                    "short",
                    (
                        Query(
                            f"max by (condition, status, reason) (twinpool_operator_pool_condition{{{OPERATOR_POOL}}})",
                            "{{condition}}: {{status}} ({{reason}})",
                        ),
                    ),
                    "table",
                ),
            ),
        ),
    ),
)
