"""What the operator measures about itself."""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from twinpool.operator.logic.actions import DrainResult


class Metrics:
    """The operator's metrics in a registry of their own, so that two operators fit into one process (tests)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "twinpool_operator_reconciles_total",
            "Pools that were planned and acted upon, by result.",
            ["result"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "twinpool_operator_reconcile_seconds",
            "Time to plan a pool and act upon the plan.",
            buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30),
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "twinpool_operator_queue_depth", "Pools that wait to be planned.", registry=self.registry
        )
        self.queue_age = Gauge(
            "twinpool_operator_queue_age_seconds",
            "How long the pool that is due first has waited; growing: the operator does not keep up, or follows.",
            registry=self.registry,
        )
        self.reaction_seconds = Histogram(
            "twinpool_operator_reaction_seconds",
            "Time from the event that made a pool due until the plan that it led to was carried out.",
            buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10, 60),
            registry=self.registry,
        )
        self.actions = Counter(
            "twinpool_operator_actions_total",
            "Actions of plans by what was done to which kind, and its result (stale: planned from an old view).",
            ["action", "kind", "result"],
            registry=self.registry,
        )
        self.silent_watches = Gauge(
            "twinpool_operator_silent_watches",
            "Watches that received nothing for minutes, not even the bookmarks that come each minute.",
            registry=self.registry,
        )
        self.api_requests = Counter(
            "twinpool_operator_api_requests_total",
            "Requests to the API server beside the watches, by verb and HTTP status (error: no answer).",
            ["verb", "code"],
            registry=self.registry,
        )
        self.drains = Counter(
            "twinpool_operator_drains_total",
            "Groups scaled to 0 after they were marked: drained (nothing was in flight), deadline (requests still ran "
            "after drainTimeout; they are cut after as long again, so raise it), not_serving (nothing to wait for).",
            ["result"],
            registry=self.registry,
        )
        for result in get_args(DrainResult):
            self.drains.labels(result)
        self.leader = Gauge(
            "twinpool_operator_leader", "1 while this operator holds the Lease and may write.", registry=self.registry
        )
        self.last_event = Gauge(
            "twinpool_operator_last_event_timestamp_seconds",
            "When the last event of a watch arrived, in seconds since 1970.",
            registry=self.registry,
        )

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
