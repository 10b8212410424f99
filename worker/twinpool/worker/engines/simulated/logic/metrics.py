"""The engine's counters, gauges and histograms, under the names and labels that vLLM 0.32 gives them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_TOKENS = tuple(float(2**power) for power in range(15))
_BYTES = tuple(float(4**power) for power in range(5, 19))

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: its name (counters without ``_total``), kind, help, own labels, and buckets of a histogram."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


FAMILIES: tuple[Family, ...] = (
    Family("num_requests_running", "gauge", "Number of requests in model execution batches."),
    Family("num_requests_waiting", "gauge", "Number of requests waiting to be processed."),
    Family("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage."),
    Family("prompt_tokens", "counter", "Number of prefill tokens processed."),
    Family("prompt_tokens_by_source", "counter", "Number of prompt tokens by source.", ("source",)),
    Family(
        "prompt_tokens_cached_by_source", "counter", "Prefix-cache hit tokens by the tier they came from.", ("source",)
    ),
    Family("generation_tokens", "counter", "Number of generation tokens processed."),
    Family("request_success", "counter", "Count of successfully processed requests.", ("finished_reason",)),
    Family("num_preemptions", "counter", "Cumulative number of preemption from the engine."),
    Family("prefix_cache_queries", "counter", "Prefix cache queries, in terms of number of queried tokens."),
    Family("prefix_cache_hits", "counter", "Prefix cache hits, in terms of number of cached tokens."),
    Family("external_prefix_cache_queries", "counter", "External prefix cache queries, in queried tokens."),
    Family("external_prefix_cache_hits", "counter", "External prefix cache hits, in cached tokens."),
    Family("time_to_first_token_seconds", "histogram", "Time to first token in seconds.", (), _SECONDS),
    Family("inter_token_latency_seconds", "histogram", "Inter-token latency in seconds.", (), _SECONDS),
    Family("request_queue_time_seconds", "histogram", "Time spent in WAITING phase for request.", (), _SECONDS),
    Family("request_prefill_time_seconds", "histogram", "Time spent in PREFILL phase for request.", (), _SECONDS),
    Family("request_prefill_kv_computed_tokens", "histogram", "New KV tokens computed during prefill.", (), _TOKENS),
    Family("e2e_request_latency_seconds", "histogram", "E2e request latency in seconds.", (), _SECONDS),
    Family("iteration_tokens_total", "histogram", "Number of tokens per engine_step.", (), _TOKENS),
    Family("nixl_xfer_time_seconds", "histogram", "Transfer duration of NIXL KV Cache transfers.", (), _SECONDS),
    Family("nixl_bytes_transferred", "histogram", "Bytes transferred per NIXL KV Cache transfer.", (), _BYTES),
    Family("nixl_num_descriptors", "histogram", "Descriptors per NIXL KV Cache transfer.", (), _TOKENS),
    Family("nixl_num_failed_transfers", "counter", "Number of failed NIXL KV Cache transfers."),
    Family("nixl_num_kv_expired_reqs", "counter", "Number of requests that had their KV expire (on prefill)."),
    Family("nixl_num_notifications_after_expiry", "counter", "Completion notifications of untracked requests."),
)

#: What an engine that speculates has besides; vLLM has none of it otherwise.
SPECULATION: tuple[Family, ...] = (
    Family("spec_decode_num_drafts", "counter", "Number of spec decoding drafts."),
    Family("spec_decode_num_draft_tokens", "counter", "Number of draft tokens."),
    Family("spec_decode_num_accepted_tokens", "counter", "Number of accepted tokens."),
    Family("spec_decode_num_accepted_tokens_per_pos", "counter", "Accepted tokens per draft position.", ("position",)),
)

#: What an engine with a host tier has besides, and what one with further tiers has.
OFFLOADING: tuple[Family, ...] = (
    Family("kv_offload_load_bytes", "counter", "Bytes loaded from offload storage to GPU."),
    Family("kv_offload_load_time", "counter", "Load time from offload storage to GPU, in seconds."),
    Family("kv_offload_store_bytes", "counter", "Bytes stored from GPU to offload storage."),
)
TIERING: tuple[Family, ...] = (
    Family("kv_offload_tiering_chunk_queries", "counter", "Chunk lookup queries sent to a tier.", ("tier",)),
    Family("kv_offload_tiering_chunk_hits", "counter", "Chunk lookup hits in a tier.", ("tier",)),
    Family("kv_offload_tiering_read_bytes", "counter", "Bytes read from secondary tiers.", ("tier",)),
    Family("kv_offload_tiering_read_time", "counter", "Time reading from secondary tiers, in seconds.", ("tier",)),
    Family("kv_offload_tiering_write_bytes", "counter", "Bytes written to secondary tiers.", ("tier",)),
)

#: Label values that exist from the start, so that a rate over them does.
_PRESET = {
    "prompt_tokens_by_source": ("local_compute", "local_cache_hit", "external_kv_transfer"),
    "prompt_tokens_cached_by_source": ("device", "host", "p2p", "disk", "external_unspecified"),
    "request_success": ("stop", "length", "abort", "error"),
}


@dataclass(slots=True)
class Histogram:
    """Counts per bucket (the last one without bound) and the sum of all observations."""

    buckets: tuple[float, ...]
    sum: float = 0.0
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Start with empty buckets."""
        self.counts = [0] * (len(self.buckets) + 1)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.sum += value


class Metrics:
    """All values of one engine; every family is there from the start, at zero.

    ``positions`` are those of a draft, 0 when the engine does not speculate; ``tiers`` the names of KV tiers.
    """

    def __init__(self, positions: int = 0, tiers: Sequence[str] = ()) -> None:
        self._families = (
            FAMILIES
            + (SPECULATION if positions else ())
            + (OFFLOADING if tiers else ())
            + (TIERING if len(tiers) > 1 else ())
        )
        preset = {
            **_PRESET,
            "spec_decode_num_accepted_tokens_per_pos": tuple(map(str, range(positions))),
            **{family.name: tuple(tiers) for family in TIERING},
        }
        self._values: dict[tuple[str, str], float] = {}
        self._histograms: dict[str, Histogram] = {}
        for family in self._families:
            if family.kind == "histogram":
                self._histograms[family.name] = Histogram(family.buckets)
            for label in preset.get(family.name, ("",)):
                self._values[family.name, label] = 0.0

    def add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Count ``amount`` more."""
        self._values[name, label] += amount

    def count_draft(self, drafted: int, right: int) -> None:
        """Count a draft of one sequence, of which the first ``right`` tokens were kept."""
        self.add("spec_decode_num_drafts")
        self.add("spec_decode_num_draft_tokens", drafted)
        self.add("spec_decode_num_accepted_tokens", right)
        for position in range(right):
            self.add("spec_decode_num_accepted_tokens_per_pos", 1, str(position))

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._values[name, ""] = value

    def observe(self, name: str, value: float) -> None:
        """Count one observation of a histogram."""
        self._histograms[name].observe(value)

    def value(self, name: str, label: str = "") -> float:
        """Return a counter, a gauge, or the sum of a histogram."""
        histogram = self._histograms.get(name)
        return self._values[name, label] if histogram is None else histogram.sum

    @property
    def families(self) -> tuple[Family, ...]:
        """Return the families that this engine has."""
        return self._families

    def lines(self, family: Family, name: str, common: str) -> list[str]:
        """Return the samples of a family under ``name``, with ``common`` labels, in Prometheus' text format."""
        if family.kind == "histogram":
            return _histogram_lines(name, common, self._histograms[family.name])
        values = [(label, value) for (own, label), value in self._values.items() if own == family.name]
        extra = f',{family.labels[0]}="' if family.labels else ""
        return [
            f'{name}{{{common}{extra}{label}"}} {value}' if extra else f"{name}{{{common}}} {value}"
            for label, value in values
        ]


def render(ranks: Sequence[Metrics], model: str, cache: Mapping[str, int] | None = None) -> str:
    """Return the metrics of all ranks in Prometheus' text format (version 0.0.4); ranks are vLLM's label ``engine``.

    ``cache`` has settings of the KV cache, which vLLM tells as labels, without the model's name.
    """
    lines: list[str] = []
    if cache is not None:
        name = "vllm:cache_config_info"
        lines += [f"# HELP {name} Information of the LLMEngine CacheConfig", f"# TYPE {name} gauge"]
        labels = ",".join(f'{key}="{value}"' for key, value in cache.items())
        lines += [f'{name}{{{labels},engine="{number}"}} 1.0' for number in range(len(ranks))]
    for family in ranks[0].families:
        name = f"vllm:{family.name}{'_total' if family.kind == 'counter' else ''}"
        lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
        for number, rank in enumerate(ranks):
            lines += rank.lines(family, name, f'engine="{number}",model_name="{_escaped(model)}"')
    return "\n".join(lines) + "\n"


def _histogram_lines(name: str, common: str, histogram: Histogram) -> list[str]:
    lines, total = [], 0
    bounds: Sequence[str] = [*map(str, histogram.buckets), "+Inf"]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        lines.append(f'{name}_bucket{{{common},le="{bound}"}} {total}')
    return [*lines, f"{name}_sum{{{common}}} {histogram.sum}", f"{name}_count{{{common}}} {total}"]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
