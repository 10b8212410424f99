"""What the operator measures about itself; every metric is declared in :mod:`twinpool.core.metrics.operator`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from twinpool.core.metrics.operator import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from twinpool.operator.logic.figures import Figure
    from twinpool.operator.shell.watch import PoolKey

_OF_POOLS = "twinpool_operator_pool_"

# A second series beside each counter and histogram that nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Pools(Collector):
    """The figures of every pool that this operator looks after, as of its last plan; those of others are forgotten."""

    def __init__(self) -> None:
        self._figures: dict[PoolKey, tuple[Figure, ...]] = {}

    def tell(self, key: PoolKey, figures: Iterable[Figure]) -> None:
        """Replace what is known of a pool."""
        self._figures[key] = tuple(figures)

    def forget(self, key: PoolKey) -> None:
        """The pool is gone."""
        self._figures.pop(key, None)

    def forget_all(self) -> None:
        """Another operator looks after the pools now."""
        self._figures.clear()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all metrics of pools (prometheus-client)."""
        families = {
            name.removeprefix(_OF_POOLS): GaugeMetricFamily(name, metric.text, labels=metric.label_names)
            for name, metric in METRICS.items()
            if name.startswith(_OF_POOLS)
        }
        for key, figures in self._figures.items():
            for figure in figures:
                families[figure.metric].add_metric([*key, *figure.labels], figure.value)
        yield from families.values()


class Metrics:
    """The operator's metrics in a registry of their own, so that two operators fit into one process (tests)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconciles = self._counter("reconciles_total")
        self.reconcile_seconds = self._histogram("reconcile_seconds")
        self.queue_depth = self._gauge("queue_depth")
        self.queue_age = self._gauge("queue_age_seconds")
        self.reaction_seconds = self._histogram("reaction_seconds")
        self.actions = self._counter("actions_total")
        self.silent_watches = self._gauge("silent_watches")
        self.api_requests = self._counter("api_requests_total")
        self.drains = self._counter("drains_total")
        self.scaling_changes = self._counter("scaling_changes_total")
        self.leader = self._gauge("leader")
        self.last_event = self._gauge("last_event_timestamp_seconds")
        self.pools = Pools()
        self.registry.register(self.pools)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)

    def _counter(self, name: str) -> Counter:
        metric = METRICS[f"twinpool_operator_{name}"]
        made = Counter(metric.name, metric.text, metric.label_names, registry=self.registry)
        for values in metric.preset:
            made.labels(*values)
        return made

    def _gauge(self, name: str) -> Gauge:
        metric = METRICS[f"twinpool_operator_{name}"]
        return Gauge(metric.name, metric.text, metric.label_names, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        metric = METRICS[f"twinpool_operator_{name}"]
        return Histogram(metric.name, metric.text, metric.label_names, registry=self.registry, buckets=metric.buckets)
