"""KV tiers of one worker: from where on they are expected to pay, and what the engine's counters say that they did."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinpool.core.tier_use import TierUse, compute_seconds, stored_bytes, uses
from twinpool.core.tiers import ASSUMED_BANDWIDTH, ASSUMED_SETUP, TierPrice, pays_from
from twinpool.worker.logic.load import series
from twinpool.worker.logic.pricing import Surroundings, basis

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.core.protocol import WorkerConfig


def sizes(config: WorkerConfig) -> dict[str, int]:
    """Return the bytes of the tiers that the pod has, in the engine's order."""
    every = {"host": config.host_kv_bytes, "disk": config.disk_kv_bytes, "shared": config.shared_kv_bytes}
    return {kind: size for kind, size in every.items() if size}


def expected(config: WorkerConfig, found: Surroundings) -> str:
    """Say of each tier from how many tokens on it should beat computing; empty without tiers."""
    if not sizes(config):
        return ""
    known = basis(config, found)
    parts = []
    for kind, size in sizes(config).items():
        ways = dict.fromkeys(("host", kind))
        token = sum(known.kv_bytes / ASSUMED_BANDWIDTH[way] for way in ways)
        least = pays_from(known.prices, TierPrice(sum(ASSUMED_SETUP[way] for way in ways), token))
        gain = "loses against computing" if least is None else f"pays from {least} tokens on"
        parts.append(f"{kind} ({size / 2**30:.0f} GiB, {size // known.kv_bytes} tokens) {gain}")
    return f"{', '.join(parts)} ({known.words}; estimated, with assumed bandwidths)"


@dataclass(frozen=True)
class TierState:
    """What the tiers did since the engine's start."""

    sizes: Mapping[str, int]
    used: tuple[TierUse, ...]
    #: Bytes that gave way to others, by tier.
    evicted: Mapping[str, float]
    #: Seconds to compute one prompt token; None where that is not known.
    compute: float | None

    def to_json(self) -> dict[str, Any]:
        """Return it as ``/status`` shows it."""
        return {
            "computeSecondsPerToken": self.compute,
            "tiers": [
                {
                    "kind": use.kind,
                    "bytes": self.sizes[use.kind],
                    "loadedTokens": use.tokens,
                    "loadSecondsPerToken": use.seconds_per_token,
                    "evictedBytes": self.evicted[use.kind],
                }
                for use in self.used
            ],
        }


def read(config: WorkerConfig, metrics: str, removed: Mapping[str, int]) -> TierState | None:
    """Return what an engine's metrics say, over all its ranks; None for a worker without tiers.

    ``removed`` are the bytes that this launcher removed from disk and shared tiers. The host's memory forgets by
    itself and tells nobody: what was stored there beyond its size has gone.
    """
    have = sizes(config)
    if not have:
        return None

    def total(name: str, **labels: str) -> float:
        return sum(value for found, value in series(metrics, name) if _has(found, labels))

    # On a decode worker the counter takes tokens that were handed over for computed ones.
    compute = None if config.role == "decode" else compute_seconds(total)
    host = max(0.0, stored_bytes(total) - have["host"])
    return TierState(have, uses(total, list(have)), {**dict.fromkeys(have, 0.0), **removed, "host": host}, compute)


def _has(written: str, labels: Mapping[str, str]) -> bool:
    return all(re.search(f'[{{,]{name}="{re.escape(value)}"', written) for name, value in labels.items())
