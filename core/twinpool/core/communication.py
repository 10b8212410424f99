"""What ranks of a model replica pay to talk to each other, in seconds: tensor, expert and pipeline parallelism.

Pure arithmetic over a link's bandwidth and latency; nothing overlaps computation here, so these are upper bounds of
what a step gets longer by. What a group really reaches, preflight measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinpool.core.kv import ModelShape

#: Bytes of an activation (bfloat16).
ACTIVATION_BYTES = 2
#: All-reduces in each layer: one after attention, one after the MLP (Megatron-LM, arXiv 1909.08053, section 3).
REDUCES = 2
#: Bytes of an element sent to an expert (FP8) and back (bfloat16): DeepSeek-V3, ISCA'25, section 2.3.2.
DISPATCH_BYTES, COMBINE_BYTES = 1, 2


@dataclass(frozen=True, slots=True)
class Wire:
    """The widest link that a message crosses: bytes/s of one GPU in one direction, seconds before the first byte."""

    bandwidth: float
    latency: float = 0.0

    def seconds(self, size: float) -> float:
        """Return the seconds that a message of ``size`` bytes takes."""
        return self.latency + size / self.bandwidth


def all_reduce_seconds(size: float, ranks: int, wire: Wire) -> float:
    """Return the seconds of an all-reduce of ``size`` bytes over ``ranks`` GPUs.

    A ring moves ``2 (r-1)/r`` of the bytes in ``2 (r-1)`` steps (Thakur et al., 2005; nccl-tests calls the factor bus
    bandwidth); small messages go to everybody at once, ``r-1`` times the bytes in one step, as engines do. The shorter
    one counts.
    """
    if ranks <= 1:
        return 0.0
    ring = 2 * (ranks - 1) * wire.seconds(size / ranks)
    return min(ring, wire.seconds((ranks - 1) * size))


def all_to_all_seconds(tokens: float, copies: float, hidden: int, ranks: int, wire: Wire) -> float:
    """Return the seconds of dispatch and combine of ``tokens`` on each of ``ranks`` GPUs in one MoE layer.

    Each token goes to ``copies`` experts and comes back; one of ``ranks`` of them is at home: ``n k d (1 + 2) (1 - 1/r)
    / bandwidth`` (DeepSeek-V3, ISCA'25, section 2.3.2). Even routing; the slowest rank decides in truth.
    """
    if ranks <= 1:
        return 0.0
    size = tokens * copies * hidden * (DISPATCH_BYTES + COMBINE_BYTES) * (1 - 1 / ranks)
    return 2 * wire.latency + size / wire.bandwidth


def tensor_seconds(shape: ModelShape, tokens: float, ranks: int, wire: Wire) -> float:
    """Return the seconds that a step of ``tokens`` waits for all-reduces over ``ranks`` GPUs, in all layers."""
    return REDUCES * shape.layers * all_reduce_seconds(tokens * shape.hidden * ACTIVATION_BYTES, ranks, wire)


def expert_seconds(shape: ModelShape, tokens: float, ranks: int, wire: Wire) -> float:
    """Return the seconds that a step of ``tokens`` on each GPU waits for experts on ``ranks`` GPUs; 0 if dense."""
    if shape.experts is None:
        return 0.0
    layer = all_to_all_seconds(tokens, shape.experts.per_token, shape.hidden, ranks, wire)
    return shape.experts.layers * layer


def pipeline_seconds(shape: ModelShape, tokens: float, stages: int, wire: Wire) -> float:
    """Return the seconds in which activations of ``tokens`` cross the ``stages - 1`` links of a pipeline."""
    return (stages - 1) * wire.seconds(tokens * shape.hidden * ACTIVATION_BYTES) if stages > 1 else 0.0


def pipeline_bubble(stages: int, batches: int) -> float:
    """Return the share of time that stages idle while ``batches`` pass through: ``(p-1)/(m+p-1)`` (GPipe, 2019)."""
    return (stages - 1) / (batches + stages - 1)
