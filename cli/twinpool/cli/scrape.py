"""What a ``/metrics`` page says, and what two of them say about the time between. Pure.

Counters begin again at 0 when a process is replaced; what was counted since is then all that the new one has. Quantiles
are estimated within a bucket as Prometheus' ``histogram_quantile`` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Samples by name and sorted labels."""

    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def of(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yield labels and value of every sample of ``name`` that has all of ``labels``."""
        for found, value in self.samples.get(name, {}).items():
            known = dict(found)
            if labels.items() <= known.items():
                yield known, value

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of those samples, 0 without any."""
        return sum(value for _, value in self.of(name, **labels))


def parse(text: str) -> Scrape:
    """Return what a page in Prometheus' text format says.

    Raises
    ------
    ValueError
        When it is no such page.
    """
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return Scrape(samples)


def added(scrapes: list[Scrape]) -> Scrape:
    """Return the samples of several processes added up."""
    result: dict[str, dict[Labels, float]] = {}
    for scrape in scrapes:
        for name, values in scrape.samples.items():
            mine = result.setdefault(name, {})
            for labels, value in values.items():
                mine[labels] = mine.get(labels, 0.0) + value
    return Scrape(result)


def since(before: Scrape, after: Scrape) -> Scrape:
    """Return what the counters of one process counted between two of its pages; gauges make no sense in it."""
    result: dict[str, dict[Labels, float]] = {}
    for name, values in after.samples.items():
        old = before.samples.get(name, {})
        result[name] = {
            labels: value - old.get(labels, 0.0) if value >= old.get(labels, 0.0) else value
            for labels, value in values.items()
        }
    return Scrape(result)


def quantile(counted: Scrape, histogram: str, share: float, **labels: str) -> float | None:
    """Return the value below which ``share`` of what a histogram counted lies, or None when it counted nothing."""
    buckets: dict[float, float] = {}
    for known, value in counted.of(f"{histogram}_bucket", **labels):
        bound = float(known["le"])
        buckets[bound] = buckets.get(bound, 0.0) + value
    ordered = [(0.0, 0.0), *sorted(buckets.items())]
    wanted = share * ordered[-1][1]
    if not wanted:
        return None
    for (low, below), (high, until) in pairwise(ordered):
        if until >= wanted:
            # What lies beyond the last bound is only known to be longer.
            return low if math.isinf(high) else low + (high - low) * (wanted - below) / (until - below)
    raise AssertionError("the last bucket holds everything")
