"""Proof that the decode worker did not compute the prompt itself, read from its own counters.

Equal text proves nothing: a decode engine whose transfer failed may silently compute the prompt again and answer the
same. What cannot lie is how many prompt tokens came from where (``vllm:prompt_tokens_by_source_total``), counted when
they are used, and how many bytes NIXL moved.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.demo.client import total

_BY_SOURCE = "vllm:prompt_tokens_by_source_total"


@dataclass(frozen=True, slots=True)
class HandoffCounters:
    """Counters of one decode engine: prompt tokens by where they came from, bytes and transfers of NIXL."""

    transferred: float
    computed: float
    cached: float
    bytes_moved: float
    failed: float

    @classmethod
    def read(cls, metrics: str) -> HandoffCounters:
        """Read the counters from the engine's Prometheus text."""
        return cls(
            transferred=total(metrics, _BY_SOURCE, source="external_kv_transfer"),
            computed=total(metrics, _BY_SOURCE, source="local_compute"),
            cached=total(metrics, _BY_SOURCE, source="local_cache_hit"),
            bytes_moved=total(metrics, "vllm:nixl_bytes_transferred_sum"),
            failed=total(metrics, "vllm:nixl_num_failed_transfers_total"),
        )

    def since(self, before: HandoffCounters) -> HandoffCounters:
        """Return what was counted after ``before``."""
        return HandoffCounters(
            self.transferred - before.transferred,
            self.computed - before.computed,
            self.cached - before.cached,
            self.bytes_moved - before.bytes_moved,
            self.failed - before.failed,
        )

    def handed_over(self) -> bool:
        """Say whether the prompt came by transfer: at most the last token was computed here, and nothing failed."""
        return self.transferred > 0 and self.computed <= 1 and self.failed == 0
