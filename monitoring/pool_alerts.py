"""Alerts about one pool: it does not answer, misses its objectives, or is about to."""

from __future__ import annotations

from monitoring.alert import Alert

_BY = "namespace, pool"
_LABELS = 'namespace="team",pool="llama"'
_OWN = 'pool_namespace="team",pool="llama"'
_ASKED = f'twinpool_router_requests_total{{{_LABELS},route="/v1/completions",code="200"}}'
_FAILED = f'twinpool_router_requests_total{{{_LABELS},route="/v1/completions",code="502"}}'
_TURNED = f'twinpool_router_turned_away_total{{{_LABELS},reason="full"}}'
_READY = f'twinpool_operator_pool_condition{{{_OWN},condition="Ready"'
_GROUPS = f'twinpool_operator_pool_groups{{{_OWN},role="decode"'


def _p99(metric: str) -> str:
    return f"histogram_quantile(0.99, sum by (le, {_BY}) (rate({metric}_bucket[5m])))"


def _over_objective(metric: str, objective: str) -> str:
    """Return p99 as a multiple of the objective; no data while the pool has none or nobody asks."""
    wanted = f'max by (pool_namespace, pool) (twinpool_operator_pool_objective_seconds{{objective="{objective}"}})'
    named = f'label_replace({wanted}, "namespace", "$1", "pool_namespace", "(.*)")'
    return f"{_p99(metric)} / on ({_BY}) group_left () max by ({_BY}) ({named})"


def _histogram(metric: str, slow: str, fast: str) -> tuple[tuple[str, str], ...]:
    """Return buckets: ``fast`` counts values up to 0.5 s, ``slow`` all."""
    name = f"twinpool_router_{metric}_bucket{{{_LABELS}"
    return ((f'{name},le="0.5"}}', fast), (f'{name},le="4"}}', slow), (f'{name},le="+Inf"}}', slow))


_TTFT, _ITL = "twinpool_router_time_to_first_token_seconds", "twinpool_router_inter_token_seconds"
_WISH = (f'twinpool_operator_pool_objective_seconds{{{_OWN},objective="ttft"}}', "0.8x60")
_WISH_ITL = (f'twinpool_operator_pool_objective_seconds{{{_OWN},objective="itl"}}', "0.8x60")

POOL_ALERTS = (
    Alert(
        "TwinpoolPoolNotReady",
        "critical",
        'max by (pool_namespace, pool, reason) (twinpool_operator_pool_condition{condition="Ready",status!="True"})',
        0,
        10,
        "Pool {{ $labels.pool_namespace }}/{{ $labels.pool }} is not ready: {{ $labels.reason }}",
        "The pool has no prefill group, no decode group or no router that serves. Requests get HTTP 503.",
        (
            "`kubectl -n NAMESPACE describe tpool POOL`: the condition Ready has the cause and the next step.",
            "`kubectl -n NAMESPACE get pods -l serving.twinpool.dev/pool=POOL`: which pods are missing or not ready.",
            "`twinpool explain POOL --placement` when the condition Placed is not True.",
        ),
        (
            "Engines that end: read the last lines in the condition, or `kubectl logs POD -c engine --previous`.",
            "No room: add nodes, free GPUs, or lower `replicas` or `parallelism`.",
            "After an edit: go back to the revision before (`twinpool rollout undo POOL`).",
        ),
        ((_READY + ',status="False",reason="NoGroup"}', "1x60"),),
        ((_READY + ',status="True",reason="Serving"}', "1x60"),),
        empty="the pool is ready",
    ),
    Alert(
        "TwinpoolGroupsMissing",
        "warning",
        'max by (pool_namespace, pool, role) (twinpool_operator_pool_groups{state="desired"}) '
        '- max by (pool_namespace, pool, role) (twinpool_operator_pool_groups{state="routable"})',
        0,
        20,
        "Pool {{ $labels.pool_namespace }}/{{ $labels.pool }} lacks {{ $value }} {{ $labels.role }} groups",
        "The pool serves with fewer groups than wanted. At the same load, requests wait longer.",
        (
            "`kubectl -n NAMESPACE describe tpool POOL`: Placed says what room is short, Progressing what fails.",
            "Dashboard Engine, Time to start: large models take long, which is no fault.",
        ),
        (
            "Make room, or want fewer groups.",
            "An engine that never starts: its last lines are in the condition; put right image, flags or memory.",
        ),
        ((_GROUPS + ',state="desired"}', "3x60"), (_GROUPS + ',state="routable"}', "2x60")),
        ((_GROUPS + ',state="desired"}', "3x60"), (_GROUPS + ',state="routable"}', "3x60")),
    ),
    Alert(
        "TwinpoolNeedsMoreThanAllowed",
        "warning",
        "max by (pool_namespace, pool, role) (twinpool_operator_pool_needed_groups) "
        '- max by (pool_namespace, pool, role) (twinpool_operator_pool_groups{state="desired"})',
        0,
        20,
        "Pool {{ $labels.pool_namespace }}/{{ $labels.pool }} needs {{ $value }} more {{ $labels.role }} groups",
        "More work arrives than `scaling` may make groups for: objectives will be missed.",
        (
            "`kubectl -n NAMESPACE describe tpool POOL`: the condition ScalingActive names the bound that holds.",
            "Dashboard Operator and scaling, Groups needed and wanted.",
        ),
        (
            "Raise the role's `max` in `scaling`, or `gpuBudget`.",
            "+Inf means that no number of groups keeps the objectives: they are too tight for the model and its GPUs.",
        ),
        (
            (f'twinpool_operator_pool_needed_groups{{{_OWN},role="decode"}}', "5x60"),
            (_GROUPS + ',state="desired"}', "3x60"),
        ),
        (
            (f'twinpool_operator_pool_needed_groups{{{_OWN},role="decode"}}', "3x60"),
            (_GROUPS + ',state="desired"}', "3x60"),
        ),
        empty="no pool scales",
    ),
    Alert(
        "TwinpoolRequestsFail",
        "critical",
        f'(sum by ({_BY}) (rate(twinpool_router_requests_total{{code=~"5.."}}[5m])) '
        f"or 0 * sum by ({_BY}) (rate(twinpool_router_requests_total[5m]))) "
        f"/ (sum by ({_BY}) (rate(twinpool_router_requests_total[5m])) > 0)",
        0.02,
        5,
        "{{ $value | humanizePercentage }} of the requests to {{ $labels.namespace }}/{{ $labels.pool }} fail",
        "More than 2 % of the answers have status 5xx: clients see errors.",
        (
            "Dashboard Router, Failures and retries: which role, and how its legs fail.",
            "Dashboard Engine, Engines lost by cause.",
            "`kubectl -n NAMESPACE logs -l serving.twinpool.dev/pool=POOL,serving.twinpool.dev/role=router`.",
        ),
        (
            "503: nobody serves; see TwinpoolPoolNotReady.",
            "502 with kind connect or lost: workers die; docs/worker-health.md has what helps for each cause.",
            "504: the queue's time-out; see TwinpoolTurningAway.",
        ),
        ((_ASKED, "0+60x60"), (_FAILED, "0+6x60")),
        ((_ASKED, "0+60x60"), (_FAILED, "0+0x60")),
    ),
    Alert(
        "TwinpoolTurningAway",
        "warning",
        f"sum by ({_BY}) (rate(twinpool_router_turned_away_total[5m])) "
        f"/ (sum by ({_BY}) (rate(twinpool_router_requests_total[5m])) > 0)",
        0.01,
        10,
        "{{ $labels.namespace }}/{{ $labels.pool }} turns away {{ $value | humanizePercentage }} of its requests",
        "The pool is too small for what arrives: requests get 429 or 504 instead of an answer.",
        (
            "Dashboard Router, Time in the queue.",
            "Dashboard Prefill and decode, Which role is short.",
        ),
        (
            "Add groups of the role that waits: `kubectl scale tpool/POOL`, or `prefill.replicas`.",
            "Let clients honour Retry-After. A longer `routing.queue` only helps against bursts.",
        ),
        ((_ASKED, "0+60x60"), (_TURNED, "0+6x60")),
        ((_ASKED, "0+60x60"), (_TURNED, "0+0x60")),
    ),
    Alert(
        "TwinpoolFirstTokenLate",
        "warning",
        _over_objective(_TTFT, "ttft"),
        1,
        15,
        "p99 of the first token of {{ $labels.namespace }}/{{ $labels.pool }} is {{ $value }} times its objective",
        "The slowest hundredth of the requests waits longer for the first token than `objectives.ttft` allows.",
        ("Dashboard Prefill and decode, Stages: the stage that is highest is where they wait.",),
        (
            "Queue at the router: more groups.",
            "Prefill: more prefill groups, or prefix routing.",
            "Pull: the network, or `handoff.conditional: auto`.",
            "Decode's first event: more decode groups, or more memory for KV.",
        ),
        (*_histogram("time_to_first_token_seconds", "0+60x60", "0+30x60"), _WISH),
        (*_histogram("time_to_first_token_seconds", "0+60x60", "0+60x60"), _WISH),
    ),
    Alert(
        "TwinpoolTokensSlow",
        "warning",
        _over_objective(_ITL, "itl"),
        1,
        15,
        "p99 between two tokens of {{ $labels.namespace }}/{{ $labels.pool }} is {{ $value }} times its objective",
        "Answers come slower than `objectives.itl` allows.",
        (
            "Dashboard Engine, Running requests and Inter-token latency by pod: all pods, or one.",
            "Dashboard Prefill and decode, Prompt tokens at decode by source: computed ones slow everybody there.",
        ),
        (
            "All pods: more decode groups, or fewer requests at once for each.",
            "One pod: look at its GPU (clocks, ECC); delete the pod to have it placed elsewhere.",
            "Prompts computed at decode: more prefill groups, or `handoff.conditional: always`.",
        ),
        (*_histogram("inter_token_seconds", "0+60x60", "0+30x60"), _WISH_ITL),
        (*_histogram("inter_token_seconds", "0+60x60", "0+60x60"), _WISH_ITL),
    ),
    Alert(
        "TwinpoolHandoffsFail",
        "warning",
        f"(sum by ({_BY}) (rate(vllm:nixl_num_failed_transfers_total[5m])) "
        f"+ sum by ({_BY}) (rate(vllm:nixl_num_kv_expired_reqs_total[5m]))) "
        f'/ (sum by ({_BY}) (rate(twinpool_router_handoffs_total{{outcome="remote"}}[5m])) > 0)',
        0.01,
        10,
        "{{ $value | humanizePercentage }} of the handoffs of {{ $labels.namespace }}/{{ $labels.pool }} fail",
        "KV that prefill computed does not reach decode; those prompts are read twice.",
        (
            "Dashboard Prefill and decode, Failed pulls and expired handoffs; Speed of a pull.",
            "Logs of decode engines: NIXL and UCX name the link that failed.",
        ),
        (
            "Failed: network or RDMA devices; docs/preflight.md tells how to find a bad link.",
            "Expired: decode is full; add decode groups.",
        ),
        (
            (f"vllm:nixl_num_failed_transfers_total{{{_LABELS}}}", "0+6x60"),
            (f"vllm:nixl_num_kv_expired_reqs_total{{{_LABELS}}}", "0+0x60"),
            (f'twinpool_router_handoffs_total{{{_LABELS},outcome="remote",reason=""}}', "0+60x60"),
        ),
        (
            (f"vllm:nixl_num_failed_transfers_total{{{_LABELS}}}", "0+0x60"),
            (f"vllm:nixl_num_kv_expired_reqs_total{{{_LABELS}}}", "0+0x60"),
            (f'twinpool_router_handoffs_total{{{_LABELS},outcome="remote",reason=""}}', "0+60x60"),
        ),
    ),
    Alert(
        "TwinpoolEngineRestarts",
        "warning",
        f"max by ({_BY}, pod) (increase(twinpool_worker_engine_restarts_total[30m]))",
        2,
        0,
        "The engine of {{ $labels.namespace }}/{{ $labels.pod }} was started again {{ $value }} times in 30 minutes",
        "Each restart cuts the requests that run there, and loads the model again.",
        (
            "`twinpool_worker_engine_losses_total{cause}`, and `/readyz` on port 8090 of the pod.",
            "`kubectl -n NAMESPACE logs POD -c engine`: what the engine last printed.",
        ),
        ("docs/worker-health.md has a line for each cause.", "The same node each time: cordon it."),
        ((f'twinpool_worker_engine_restarts_total{{{_LABELS},pod="a"}}', "0+0.2x60"),),
        ((f'twinpool_worker_engine_restarts_total{{{_LABELS},pod="a"}}', "1x60"),),
    ),
    Alert(
        "TwinpoolKvCacheFull",
        "warning",
        f"avg by ({_BY}, component) (vllm:kv_cache_usage_perc)",
        0.95,
        15,
        "The KV caches of {{ $labels.component }} in {{ $labels.namespace }}/{{ $labels.pool }} are full",
        "Requests wait for KV blocks, or are thrown out of the batch and computed again.",
        ("Dashboard Engine, KV cache in use and Preemptions.",),
        (
            "More groups of that role, or shorter contexts (`model.maxModelLen`).",
            "`--gpu-memory-utilization` or a smaller `--kv-cache-dtype` in `engine.args`.",
        ),
        ((f'vllm:kv_cache_usage_perc{{{_LABELS},component="decode"}}', "0.99x60"),),
        ((f'vllm:kv_cache_usage_perc{{{_LABELS},component="decode"}}', "0.9x60"),),
    ),
)
