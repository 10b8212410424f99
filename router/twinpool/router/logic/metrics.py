"""The router's own numbers: counted in the data processes, added up and written out by the control process.

Always true: a counter never goes down when a data process dies, because its last report stays in the sum; label values
come from small closed sets (routes, statuses, reasons, endpoints), so memory does not grow with what clients send.
"""

from bisect import bisect_left
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from twinpool.core.metrics import exposition
from twinpool.core.metrics.router import METRICS, SECONDS

#: Label values of one sample, in the order of the family's label names.
Labels = tuple[str, ...]

#: Upper bounds of every histogram, in seconds.
BOUNDS: Final = SECONDS


@dataclass(slots=True)
class Histogram:
    """Counts by bucket (the last one has no bound) and their sum."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0


@dataclass(slots=True)
class Numbers:
    """Values and histograms by family and label values; what one process reports."""

    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    histograms: dict[str, dict[Labels, Histogram]] = field(default_factory=dict)

    def add(self, name: str, labels: Labels = (), amount: float = 1.0) -> None:
        """Add to a counter or gauge."""
        try:
            self.values[name][labels] += amount
        except KeyError:  # the first of its kind
            self.values.setdefault(name, {})[labels] = amount

    def histogram(self, name: str, labels: Labels = ()) -> Histogram:
        """Return a histogram, to be counted in by its owner."""
        return self.histograms.setdefault(name, {}).setdefault(labels, Histogram())

    def observe(self, name: str, seconds: float, labels: Labels = ()) -> None:
        """Count one value in a histogram."""
        try:
            histogram = self.histograms[name][labels]
        except KeyError:
            histogram = self.histogram(name, labels)
        histogram.buckets[bisect_left(BOUNDS, seconds)] += 1
        histogram.total += seconds


def total(reports: Iterable[Numbers]) -> Numbers:
    """Add up what several processes report."""
    result = Numbers()
    for report in reports:
        for name, values in report.values.items():
            for labels, value in values.items():
                result.add(name, labels, value)
        for name, histograms in report.histograms.items():
            for labels, histogram in histograms.items():
                mine = result.histograms.setdefault(name, {}).setdefault(labels, Histogram())
                mine.buckets = [a + b for a, b in zip(mine.buckets, histogram.buckets, strict=True)]
                mine.total += histogram.total
    return result


def keep_workers(numbers: Numbers, workers: Container[str]) -> None:
    """Take the series of other workers out: their names are never used again, and would add up for ever."""
    families: dict[str, dict[Labels, Any]] = {**numbers.values, **numbers.histograms}
    for name, family in families.items():
        if "worker" in (labels := METRICS[name].label_names):
            place = labels.index("worker")
            for gone in [values for values in family if values[place] not in workers]:
                del family[gone]


def counters_only(report: Numbers) -> Numbers:
    """Return what is left of a process that died: what it counted, not what it was busy with."""
    kept = {name: values for name, values in report.values.items() if METRICS[name].kind == "counter"}
    return Numbers(kept, report.histograms)


def render(numbers: Numbers) -> str:
    """Write Prometheus' text format; counters and histograms whose series are known beforehand start at zero."""
    lines: list[str] = []
    for name, metric in METRICS.items():
        known = metric.preset or (() if metric.labels else ((),))
        if metric.kind == "histogram":
            histograms = {labels: Histogram() for labels in known} | numbers.histograms.get(name, {})
            lines += exposition.header(metric)
            for labels, histogram in sorted(histograms.items()):
                lines += exposition.histogram(metric, labels, histogram.buckets, histogram.total)
        else:
            values = dict.fromkeys(known, 0.0) | numbers.values.get(name, {})
            lines += exposition.family(metric, sorted(values.items()))
    return "\n".join(lines) + "\n"
