"""Read from an engine's metrics whether it still works for somebody, and whether it gets on.

Prometheus text is parsed by hand: a few values of one format do not justify a dependency inside foreign images.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

#: Gauges of vLLM (and of the simulated engine) that count requests which are not finished.
REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
#: Share of KV blocks in use; blocks that only cache a finished prompt do not count.
KV_USAGE = "vllm:kv_cache_usage_perc"
#: What a step of the engine's core moves, and nothing else does: the HTTP server alone cannot. The gauges count too,
#: because a long prompt that is read in pieces gives no token for many steps, yet fills blocks (vLLM 0.32,
#: ``v1/metrics/loggers.py``: all of them are set from what the core sends after a step).
MARKS = (
    *REQUESTS,
    KV_USAGE,
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:num_preemptions_total",
)

_ENGINE = re.compile(r'[{,]engine="([^"]*)"')


@dataclass(frozen=True)
class Work:
    """The work of one data-parallel rank of an engine at one moment."""

    #: The engine's own number of the rank.
    engine: str
    #: Requests in the batch.
    running: float
    #: Values of :data:`MARKS`, missing ones left out. Any change says that the rank made a step.
    marks: tuple[float, ...]


def work(metrics: str) -> tuple[Work, ...]:
    """Return the work of every rank, in the order of their names; empty when the text holds no counters."""
    found: dict[str, dict[str, float]] = {}
    for name in MARKS:
        for labels, value in series(metrics, name):
            match = _ENGINE.search(labels)
            of_rank = found.setdefault(match.group(1) if match else "0", {})
            of_rank[name] = of_rank.get(name, 0.0) + value
    return tuple(
        Work(engine, values.get(REQUESTS[0], 0.0), tuple(values.values())) for engine, values in sorted(found.items())
    )


def busy(metrics: str) -> bool | None:
    """Return whether any request is running or waiting; None when the text holds none of the gauges."""
    counts = [value for name in REQUESTS for value in _values(metrics, name)]
    if not counts:
        return None
    return any(value > 0 for value in counts)


def kv_held(metrics: str) -> bool:
    """Return whether KV blocks are held for somebody, such as a prompt that decode has not pulled yet."""
    return any(value > 0 for value in _values(metrics, KV_USAGE))


def _values(metrics: str, name: str) -> list[float]:
    """Return the value of every series of ``name`` (one per engine rank)."""
    return [value for _, value in series(metrics, name)]


def series(metrics: str, name: str) -> list[tuple[str, float]]:
    """Return the labels, as they are written, and the value of every series of ``name``."""
    found = []
    for line in metrics.splitlines():
        if not line.startswith(name) or line[len(name) : len(name) + 1] not in ("{", " "):
            continue
        labels, _, rest = line[len(name) :].rpartition("}")
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if not math.isnan(value):
            found.append((labels, value))
    return found
