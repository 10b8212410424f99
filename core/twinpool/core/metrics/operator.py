"""What the operator counts about itself and about the pools that it looks after."""

from __future__ import annotations

from twinpool.core.metrics.declare import Label, Metric, catalogue

_LOOP = "operator/twinpool/operator/shell/loop.py"
_SHELL = "operator/twinpool/operator/shell/operator.py"
_APPLY = "operator/twinpool/operator/shell/apply.py"
_CLUSTER = "operator/twinpool/operator/shell/cluster.py"
_POOLS = "operator/twinpool/operator/logic/figures.py"

_POOL = (Label("pool_namespace", "namespace of the pool", 1, "pools"), Label("pool", "name of the pool", 1))
_ROLE = Label("role", "prefill or decode", 2)
_RESULTS = ("done", "api_error", "not_leader", "bug")
#: How the drain of a group may end.
DRAIN_RESULTS = ("drained", "deadline", "not_serving")

METRICS = catalogue(
    (
        Metric(
            "twinpool_operator_reconciles_total",
            "counter",
            "Pools that were planned and acted upon, by result. bug: an exception that the log shows.",
            _LOOP,
            labels=(Label("result", ", ".join(_RESULTS), len(_RESULTS)),),
            preset=tuple((result,) for result in _RESULTS),
        ),
        Metric(
            "twinpool_operator_reconcile_seconds",
            "histogram",
            "Time to plan a pool and act upon the plan.",
            _LOOP,
            "seconds",
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30),
        ),
        Metric("twinpool_operator_queue_depth", "gauge", "Pools that wait to be planned.", _SHELL),
        Metric(
            "twinpool_operator_queue_age_seconds",
            "gauge",
            "How long the pool that is due first has waited; growing: the operator does not keep up, or follows.",
            _SHELL,
            "seconds",
        ),
        Metric(
            "twinpool_operator_reaction_seconds",
            "histogram",
            "Time from the event that made a pool due until the plan that it led to was carried out.",
            _LOOP,
            "seconds",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60),
        ),
        Metric(
            "twinpool_operator_actions_total",
            "counter",
            "Actions of plans by what was done to which kind, and its result (stale: planned from an old view).",
            _APPLY,
            labels=(
                Label("action", "apply, delete and the other verbs of a plan", 16),
                Label("kind", "kind of the object", 16),
                Label("result", "done, stale, refused, ...", 8),
            ),
        ),
        Metric(
            "twinpool_operator_silent_watches",
            "gauge",
            "Watches that received nothing for minutes, not even the bookmarks that come each minute.",
            _SHELL,
        ),
        Metric(
            "twinpool_operator_api_requests_total",
            "counter",
            "Requests to the API server beside the watches, by verb and HTTP status (error: no answer).",
            _CLUSTER,
            labels=(Label("verb", "HTTP verb", 6), Label("code", "HTTP status, or error", 24)),
        ),
        Metric(
            "twinpool_operator_drains_total",
            "counter",
            "Groups scaled to 0 after they were marked: drained (nothing was in flight), deadline (requests still ran "
            "after drainTimeout; they are cut after as long again, so raise it), not_serving (nothing to wait for).",
            _APPLY,
            labels=(Label("result", ", ".join(DRAIN_RESULTS), len(DRAIN_RESULTS)),),
            preset=tuple((result,) for result in DRAIN_RESULTS),
        ),
        Metric(
            "twinpool_operator_scaling_changes_total",
            "counter",
            "Changes of the numbers of groups by spec.scaling, both at once; many an hour: lengthen its stabilization.",
            _APPLY,
        ),
        Metric("twinpool_operator_leader", "gauge", "1 while this operator holds the Lease and may write.", _SHELL),
        Metric(
            "twinpool_operator_last_event_timestamp_seconds",
            "gauge",
            "When the last event of a watch arrived, in seconds since 1970.",
            _SHELL,
            "timestamp_seconds",
        ),
        Metric(
            "twinpool_operator_pool_groups",
            "gauge",
            "Groups of a role. routable below desired for long: the pool's conditions say why; updated below created: "
            "a rollout is on its way.",
            _POOLS,
            labels=(*_POOL, _ROLE, Label("state", "desired, created, ready, routable or updated", 5)),
        ),
        Metric(
            "twinpool_operator_pool_needed_groups",
            "gauge",
            "Groups that the arriving work needs (+Inf: no number is enough), where a pool scales. Above desired for "
            "long: raise max or gpuBudget.",
            _POOLS,
            labels=(*_POOL, _ROLE),
        ),
        Metric(
            "twinpool_operator_pool_gpus",
            "gauge",
            "GPUs that the existing groups of a role ask for, by the pool's present spec.",
            _POOLS,
            labels=(*_POOL, _ROLE),
        ),
        Metric(
            "twinpool_operator_pool_objective_seconds",
            "gauge",
            "The pool's objectives; compare percentiles of latency with them.",
            _POOLS,
            "seconds",
            labels=(*_POOL, Label("objective", "ttft or itl", 2)),
        ),
        Metric(
            "twinpool_operator_pool_condition",
            "gauge",
            "1 for what each condition of a pool says now; its message is in kubectl describe.",
            _POOLS,
            labels=(
                *_POOL,
                Label("condition", "type of the condition", 10),
                Label("status", "True, False or Unknown", 1),
                Label("reason", "why, in one word", 1),
            ),
        ),
    )
)
