"""Prometheus' text format (version 0.0.4) for the parts that count without prometheus-client. Standard library only."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twinpool.core.metrics.declare import Metric


def header(metric: Metric) -> list[str]:
    """Return the two lines that come before a metric's samples."""
    text = metric.text.replace("\\", r"\\").replace("\n", r"\n")
    return [f"# HELP {metric.name} {text}", f"# TYPE {metric.name} {metric.kind}"]


def family(metric: Metric, samples: Iterable[tuple[Sequence[str], float]]) -> list[str]:
    """Return the lines of a counter or gauge: its samples by label values, in the order of the labels."""
    names = metric.label_names
    return [*header(metric), *(f"{metric.name}{labels(names, values)} {value:.17g}" for values, value in samples)]


def histogram(metric: Metric, values: Sequence[str], counts: Sequence[int], total: float) -> list[str]:
    """Return the lines of one histogram, without header.

    ``counts`` are by bucket, the last one without bound, none of them cumulative; ``total`` is the sum of all values.
    """
    lines, seen, names = [], 0, metric.label_names
    for bound, count in zip((*(f"{b:g}" for b in metric.buckets), "+Inf"), counts, strict=True):
        seen += count
        lines.append(f"{metric.name}_bucket{labels((*names, 'le'), (*values, bound))} {seen}")
    return [
        *lines,
        f"{metric.name}_sum{labels(names, values)} {total:.9g}",
        f"{metric.name}_count{labels(names, values)} {seen}",
    ]


def labels(names: Sequence[str], values: Sequence[str]) -> str:
    """Return labels as they stand behind a name; nothing when there are none."""
    if not names:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
