"""The router's own numbers: counted in the data processes, added up and written out by the control process.

Always true: a counter never goes down when a data process dies, because its last report stays in the sum; label values
come from small closed sets (routes, statuses, reasons, endpoints), so memory does not grow with what clients send.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

#: Label values of one sample, in the order of the family's label names.
Labels = tuple[str, ...]

#: Name, type, label names and help of every family, in the order in which they are written.
FAMILIES: Final[dict[str, tuple[str, Labels, str]]] = {
    "twinpool_router_requests_total": (
        "counter",
        ("route", "code"),
        "Requests by route and status (499: client left).",
    ),
    "twinpool_router_handoffs_total": (
        "counter",
        ("outcome", "reason"),
        "Requests that could be split: remote (prefilled elsewhere), local (decode did all of it, and why) or failed.",
    ),
    "twinpool_router_retries_total": ("counter", ("role",), "Legs sent again to another worker."),
    "twinpool_router_worker_failures_total": (
        "counter",
        ("role", "kind"),
        "Legs that failed: connect, lost (connection), status (5xx), timeout (no first token), stall (in the answer).",
    ),
    "twinpool_router_client_aborts_total": ("counter", ("phase",), "Clients that left before their answer's end."),
    "twinpool_router_broken_streams_total": ("counter", (), "Answers cut by a worker's death."),
    "twinpool_router_turned_away_total": (
        "counter",
        ("reason",),
        "Requests that got no place at the workers: full (HTTP 429) or timeout (504).",
    ),
    "twinpool_router_queue_seconds": ("histogram", (), "Time that requests waited for a place at the workers."),
    "twinpool_router_requests_waiting": ("gauge", (), "Requests that wait for a place at the workers."),
    "twinpool_router_key_requests_total": ("counter", ("key",), "Requests by name of the client's API key."),
    "twinpool_router_time_to_first_token_seconds": (
        "histogram",
        ("route",),
        "Time from a complete request to the first byte of the answer's body.",
    ),
    "twinpool_router_first_event_seconds": (
        "histogram",
        ("handoff",),
        "Time from sending a decode leg to the first byte of its answer: remote (KV pulled first) or local.",
    ),
    "twinpool_router_inter_token_seconds": (
        "histogram",
        (),
        "Mean time between two events of a stream, one value for each stream: (last - first) / (events - 1).",
    ),
    "twinpool_router_access_log_dropped_total": ("counter", (), "Lines of the access log that nobody took."),
    "twinpool_router_prefill_leg_seconds": ("histogram", (), "Time from sending a prefill leg to its parameters."),
    "twinpool_router_requests_in_flight": ("gauge", ("endpoint", "role"), "Legs that a worker has to finish."),
    "twinpool_router_tokens_in_flight": ("gauge", ("endpoint", "role"), "Estimated tokens of those legs."),
    "twinpool_router_handoffs_unpulled": ("gauge", ("endpoint", "role"), "Prefilled handoffs with KV not pulled."),
    "twinpool_router_endpoint_admitted": ("gauge", ("endpoint", "role"), "1 when requests may be sent to the worker."),
    "twinpool_router_endpoint_suspect": (
        "gauge",
        ("endpoint", "role"),
        "Data processes that avoid the worker after failures.",
    ),
    "twinpool_router_clients": ("gauge", (), "Open client connections."),
    "twinpool_router_data_process_restarts_total": ("counter", (), "Data processes replaced."),
    "twinpool_router_discovery_synced": ("gauge", (), "1 while the list of workers follows its source."),
}

#: Upper bounds in seconds: 1 ms to 131 s, doubling.
BOUNDS: Final = tuple(0.001 * 2**n for n in range(18))


@dataclass(slots=True)
class Histogram:
    """Counts by bucket (the last one has no bound) and their sum."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one value."""
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds


@dataclass(slots=True)
class Numbers:
    """Values and histograms by family and label values; what one process reports."""

    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    histograms: dict[str, dict[Labels, Histogram]] = field(default_factory=dict)

    def add(self, name: str, labels: Labels = (), amount: float = 1.0) -> None:
        """Add to a counter or gauge."""
        family = self.values.setdefault(name, {})
        family[labels] = family.get(labels, 0.0) + amount

    def observe(self, name: str, seconds: float, labels: Labels = ()) -> None:
        """Count one value in a histogram."""
        family = self.histograms.setdefault(name, {})
        if labels not in family:
            family[labels] = Histogram()
        family[labels].observe(seconds)


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


def counters_only(report: Numbers) -> Numbers:
    """Return what is left of a process that died: what it counted, not what it was busy with."""
    kept = {name: values for name, values in report.values.items() if FAMILIES[name][0] == "counter"}
    return Numbers(kept, report.histograms)


def render(numbers: Numbers) -> str:
    """Write Prometheus' text format. Families without any value yet are left out, but for their HELP and TYPE."""
    lines: list[str] = []
    for name, (kind, label_names, text) in FAMILIES.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for labels, value in sorted(numbers.values.get(name, {}).items()):
            lines.append(f"{name}{_labels(label_names, labels)} {value:.17g}")
        for labels, histogram in sorted(numbers.histograms.get(name, {}).items()):
            lines += _histogram_lines(name, label_names, labels, histogram)
    return "\n".join(lines) + "\n"


def _histogram_lines(name: str, names: Labels, labels: Labels, histogram: Histogram) -> list[str]:
    lines, seen = [], 0
    for bound, count in zip((*(f"{b:g}" for b in BOUNDS), "+Inf"), histogram.buckets, strict=True):
        seen += count
        lines.append(f"{name}_bucket{_labels((*names, 'le'), (*labels, bound))} {seen}")
    return [
        *lines,
        f"{name}_sum{_labels(names, labels)} {histogram.total:.9g}",
        f"{name}_count{_labels(names, labels)} {seen}",
    ]


def _labels(names: Labels, values: Labels) -> str:
    if not names:
        return ""
    pairs = (f'{n}="{_escape(v)}"' for n, v in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
