"""What a declaration of a metric says, and the rules that all of them keep.

Always true of a declared metric: its name follows the naming rules of Prometheus
(https://prometheus.io/docs/practices/naming/), its labels are bounded, and none of them is one that a scrape sets.
Standard library only, because the worker's launcher runs inside images that hold nothing of ours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Kind = Literal["counter", "gauge", "histogram"]
#: What a label's values may grow with, beside a fixed number of them.
Growth = Literal["workers", "pools", "keys"]

#: Labels that Prometheus or the scrape configuration puts on every series; one of ours of that name would be renamed to
#: ``exported_...``. ``component`` is router, prefill, decode or operator.
TARGET_LABELS = frozenset(
    {"cluster", "component", "container", "endpoint", "instance", "job", "namespace", "node", "pod", "prometheus"}
    | {"service"}
)

_NAME = re.compile(r"twinpool_[a-z]+(_[a-z0-9]+)+")
_LABEL = re.compile(r"[a-z][a-z0-9_]*")
_RESERVED_SUFFIXES = ("_bucket", "_count", "_sum", "_created")
#: Units are base units, and the last word of a name (before ``_total``); counts of things have none.
UNITS = ("", "seconds", "bytes", "bytes_per_second", "timestamp_seconds")
#: Words that say a unit which is not a base unit.
_WRONG_UNITS = frozenset(
    {"ms", "milliseconds", "us", "minutes", "hours", "kb", "mb", "gb", "kib", "mib", "gib", "percent"}
)


@dataclass(frozen=True)
class Label:
    """A label: its name, what its values are, and how many there can be (``growth``: for each of these)."""

    name: str
    meaning: str
    most: int
    growth: Growth | None = None


@dataclass(frozen=True)
class Metric:
    """One metric.

    ``text`` is what it counts and what to conclude, ``made`` the module that counts it (path in the repository),
    ``buckets`` the upper bounds of a histogram in ``unit``, ``preset`` the label values of series that are there from
    the start, at zero, so that a rate over them exists before the first event.
    """

    name: str
    kind: Kind
    text: str
    made: str
    unit: str = ""
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    preset: tuple[tuple[str, ...], ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return the names of its labels, in the order of their values."""
        return tuple(label.name for label in self.labels)

    def most_series(self, counts: Mapping[Growth, int]) -> int:
        """Return how many series there can be at most, a histogram counted once, with so many workers, pools, keys."""
        most = 1
        for label in self.labels:
            most *= label.most * (counts[label.growth] if label.growth else 1)
        return most


def catalogue(metrics: Iterable[Metric]) -> dict[str, Metric]:
    """Return the metrics by name, in their order.

    Raises
    ------
    ValueError
        A declaration breaks a rule, or two have one name; the message names it.
    """
    found: dict[str, Metric] = {}
    for metric in metrics:
        if wrong := [*problems(metric), *(["declared twice"] if metric.name in found else [])]:
            raise ValueError(f"metric {metric.name}: {'; '.join(wrong)}")
        found[metric.name] = metric
    return found


def problems(metric: Metric) -> Iterator[str]:
    """Yield every rule that a declaration breaks."""
    stem = metric.name.removesuffix("_total")
    if not _NAME.fullmatch(metric.name):
        yield "names are twinpool_<part>_<what>, lower-case words joined by _"
    if (metric.kind == "counter") != (stem != metric.name):
        yield "counters end in _total, nothing else does"
    if stem.endswith(_RESERVED_SUFFIXES):
        yield f"{', '.join(_RESERVED_SUFFIXES)} are suffixes that Prometheus adds itself"
    if _WRONG_UNITS & set(stem.split("_")):
        yield "base units only: seconds, bytes, ratios"
    if metric.unit not in UNITS or not stem.endswith(f"_{metric.unit}" if metric.unit else ""):
        yield f"the unit {metric.unit!r} must be a base unit and the name's last word"
    if (metric.kind == "histogram") != bool(metric.buckets) or list(metric.buckets) != sorted(set(metric.buckets)):
        yield "a histogram has buckets in rising order, nothing else has any"
    if not metric.text.endswith("."):
        yield "the text is whole sentences"
    for label in metric.labels:
        if not _LABEL.fullmatch(label.name) or label.name in TARGET_LABELS | {"le", "quantile"}:
            yield f"the label {label.name} is taken by Prometheus or by the scrape, or no lower-case word"
    if any(len(values) != len(metric.labels) for values in metric.preset):
        yield "preset values are as many as labels"
