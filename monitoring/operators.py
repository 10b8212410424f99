"""Dashboard: what the operator decides, how fast, and what keeps it from it."""

from __future__ import annotations

from monitoring.panel import Dashboard, Panel, Query, quantile, total

OPERATOR = Dashboard(
    "twinpool-operator",
    "Twinpool / Operator and scaling",
    "All pools of the cluster: conditions, rollouts, and the operator that brings them about.",
    (
        (
            "Pools",
            (
                Panel(
                    "Pools by what they say",
                    "How many pools say what of themselves, with the reason. Ready: False or Placed: False that stays: "
                    "`twinpool status` names the pools, `twinpool doctor POOL` the next step. Progressing: False "
                    "(Complete) is well, NotMeasured only says that nothing was measured.",
                    "short",
                    (
                        Query(
                            "count by (condition, status, reason) (twinpool_operator_pool_condition)",
                            "{{condition}}: {{status}} ({{reason}})",
                        ),
                    ),
                ),
                Panel(
                    "Groups missing",
                    "Wanted less routable groups of all pools, by role. Above zero for long: no room, no quota, or "
                    "engines that do not start.",
                    "short",
                    (
                        Query(
                            'sum by (role) (twinpool_operator_pool_groups{state="desired"}) '
                            '- sum by (role) (twinpool_operator_pool_groups{state="routable"})',
                            "{{role}}",
                        ),
                    ),
                ),
                Panel(
                    "Groups of an old revision",
                    "Groups that a rollout has yet to replace, by pool. Flat above zero: the rollout waits; condition "
                    "Progressing says for what.",
                    "short",
                    (
                        Query(
                            'sum by (pool_namespace, pool) (twinpool_operator_pool_groups{state="created"}) '
                            '- sum by (pool_namespace, pool) (twinpool_operator_pool_groups{state="updated"})',
                            "{{pool_namespace}}/{{pool}}",
                        ),
                    ),
                ),
                Panel(
                    "How drains ended",
                    "Groups per second taken out of service. deadline: requests still ran after `drainTimeout`; raise "
                    "it, or they are cut.",
                    "ops",
                    (Query(total("twinpool_operator_drains_total", "result", ""), "{{result}}"),),
                ),
            ),
        ),
        (
            "Scaling",
            (
                Panel(
                    "Groups needed and wanted",
                    "What the arriving work needs, and what `scaling` decided, for each pool that scales. Needed above "
                    "wanted for long: raise the role's `max` or `gpuBudget`; wanted above needed: stabilization, which "
                    "is well. The condition ScalingActive has the reason.",
                    "short",
                    (
                        Query(
                            "max by (pool_namespace, pool, role) (twinpool_operator_pool_needed_groups)",
                            "{{pool_namespace}}/{{pool}} {{role}} needed",
                            wish=True,
                        ),
                        Query(
                            'max by (pool_namespace, pool, role) (twinpool_operator_pool_groups{state="desired"}) '
                            "and on (pool_namespace, pool, role) twinpool_operator_pool_needed_groups",
                            "{{pool_namespace}}/{{pool}} {{role}} wanted",
                        ),
                    ),
                    empty="no pool scales",
                ),
                Panel(
                    "Decisions of scaling",
                    "Changes per hour of both numbers of a pool. Many: lengthen `scaling.stabilization`.",
                    "short",
                    (Query("sum(increase(twinpool_operator_scaling_changes_total[1h]))", "changes"),),
                ),
            ),
        ),
        (
            "The operator",
            (
                Panel(
                    "Leader",
                    "Operators that hold the Lease; 1 is right. 0: nobody acts on pools, but what serves goes on.",
                    "short",
                    (Query("sum(twinpool_operator_leader)", "leaders"),),
                ),
                Panel(
                    "Reconciliations by result",
                    "Pools looked at per second. api_error: the API server refuses or is away; bug: the log has it.",
                    "ops",
                    (Query(total("twinpool_operator_reconciles_total", "result", ""), "{{result}}"),),
                ),
                Panel(
                    "Reaction",
                    "From an event to the plan that it led to being carried out. Seconds: the API server is slow, or "
                    "many pools changed at once.",
                    "s",
                    (
                        Query(quantile(0.5, "twinpool_operator_reaction_seconds", selector=""), "p50"),
                        Query(quantile(0.99, "twinpool_operator_reaction_seconds", selector=""), "p99"),
                    ),
                ),
                Panel(
                    "Queue",
                    "Pools that wait to be looked at, and how long the first of them has waited. Growing age: the "
                    "operator does not keep up, or this one follows.",
                    "short",
                    (
                        Query("max(twinpool_operator_queue_depth)", "pools"),
                        Query("max(twinpool_operator_queue_age_seconds)", "seconds"),
                    ),
                ),
                Panel(
                    "Actions",
                    "What plans did, per second. A steady rate on a quiet cluster: something undoes what the operator "
                    "writes; a condition names the other manager.",
                    "ops",
                    (Query(total("twinpool_operator_actions_total", "action, kind", ""), "{{action}} {{kind}}"),),
                ),
                Panel(
                    "Requests to the API server",
                    "Per second by status. 409 now and then is a newer view winning; 403: rights are missing; 429: the "
                    "API server sheds load; error: no answer.",
                    "ops",
                    (Query(total("twinpool_operator_api_requests_total", "verb, code", ""), "{{verb}} {{code}}"),),
                ),
                Panel(
                    "Silent watches",
                    "Watches that heard nothing for minutes. Above zero for long: restart the operator and report it.",
                    "short",
                    (Query("max(twinpool_operator_silent_watches)", "watches"),),
                ),
                Panel(
                    "Seconds since the last event",
                    "A busy cluster has events all the time; minutes without any while pods come and go mean that "
                    "watches are broken.",
                    "s",
                    (Query("time() - max(twinpool_operator_last_event_timestamp_seconds)", "since"),),
                ),
            ),
        ),
    ),
    per_pool=False,
)
