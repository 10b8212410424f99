"""Read from an engine's metrics whether it still works for somebody.

Prometheus text is parsed by hand: three gauges of one format do not justify a dependency inside foreign images.
"""

from __future__ import annotations

import math

#: Gauges of vLLM (and of the simulated engine) that count requests which are not finished.
REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
#: Share of KV blocks in use; blocks that only cache a finished prompt do not count.
KV_USAGE = "vllm:kv_cache_usage_perc"


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
    found = []
    for line in metrics.splitlines():
        if not line.startswith(name) or line[len(name) : len(name) + 1] not in ("{", " "):
            continue
        try:
            value = float(line.rsplit("}", 1)[-1].split()[0] if "{" in line else line.split()[1])
        except (ValueError, IndexError):
            continue
        if not math.isnan(value):
            found.append(value)
    return found
