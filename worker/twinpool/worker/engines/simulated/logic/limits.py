"""The sizes of a simulated engine, and of one of its steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the engine. ``kv_blocks`` must hold one sequence of ``max_model_len`` tokens. Lease in seconds."""

    block_size: int = 16
    kv_blocks: int = 4096
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    lease_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step that has begun: how long it takes (seconds) and how many tokens it computes."""

    seconds: float
    tokens: int
