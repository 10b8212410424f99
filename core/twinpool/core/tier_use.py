"""What an engine's counters say of its KV tiers: tokens that each gave back, and how long that took. Pure.

The names are vLLM's (0.32: ``kv_connector/v1/offloading/metrics.py``, ``kv_offload/tiering/base.py``). Everything that
is loaded comes through the host's memory; a further tier is read into it first. vLLM calls the host ``0:primary`` and
further tiers ``1:fs``, ``2:fs`` in the order of its settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
_OFFLOAD, _TIERING = "vllm:kv_offload_", "vllm:kv_offload_tiering_"


class Total(Protocol):
    """Adds up the samples of a name that have the given labels; 0 without any."""

    def __call__(self, name: str, **labels: str) -> float:
        """Return the sum."""
        ...


@dataclass(frozen=True, slots=True)
class TierUse:
    """Tokens that a tier gave back, and the seconds that this took until they were on the accelerator."""

    kind: str
    tokens: float
    seconds: float

    @property
    def seconds_per_token(self) -> float | None:
        """Return what one token took; None while none came."""
        return self.seconds / self.tokens if self.tokens > 0 else None


def uses(total: Total, kinds: Sequence[str]) -> tuple[TierUse, ...]:
    """Return what each of the tiers ``kinds``, in the engine's order with the host first, gave back."""
    if not kinds:
        return ()
    loaded = total(_BY_SOURCE, source="host") + total(_BY_SOURCE, source="disk")
    per_token = total(f"{_OFFLOAD}load_time_total") / loaded if loaded else 0.0
    size = total(f"{_OFFLOAD}load_bytes_total") / loaded if loaded else 0.0
    found = []
    for number, kind in enumerate(kinds[1:], 1):
        tier = f"{number}:fs"
        tokens = total(f"{_TIERING}read_bytes_total", tier=tier) / size if size else 0.0
        found.append(TierUse(kind, tokens, total(f"{_TIERING}read_time_total", tier=tier) + tokens * per_token))
    own = max(0.0, loaded - sum(use.tokens for use in found))
    return (TierUse(kinds[0], own, own * per_token), *found)


def stored_bytes(total: Total) -> float:
    """Return the bytes that went to the host's memory."""
    return total(f"{_OFFLOAD}store_bytes_total")


def compute_seconds(total: Total) -> float | None:
    """Return the seconds for each prompt token that was computed; None while none was.

    Prompts that share a step are counted for its whole time each: that is more than computing one costs, so a tier
    that loses against it loses indeed.
    """
    tokens = total("vllm:request_prefill_kv_computed_tokens_sum")
    return total("vllm:request_prefill_time_seconds_sum") / tokens if tokens else None
