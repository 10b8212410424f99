"""How long prefill, a decode step and a KV transfer take. Pure arithmetic; all times in seconds.

A roofline: a step takes as long as its arithmetic or its memory traffic, whichever is longer, at the share of the peak
that engines reach. Good for ranking and for simulation; what it says is never a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.core.kv import ModelShape, kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One kind of GPU.

    Parameters
    ----------
    flops:
        Dense bfloat16 FLOP/s of the data sheet.
    bandwidth:
        Bytes/s of its memory.
    flops_share, bandwidth_share:
        What an engine reaches of the two (MFU and MBU).
    overhead:
        Seconds that every step costs regardless of its size (scheduling, launches).
    memory:
        Bytes of its memory; 0 when that does not matter.
    """

    name: str
    flops: float
    bandwidth: float
    flops_share: float = 0.5
    bandwidth_share: float = 0.6
    overhead: float = 0.001
    memory: float = 0.0


#: Data-sheet peaks (NVIDIA A100 and H100 SXM, H200); shares as in Twinpool's other estimates.
ACCELERATORS: dict[str, Accelerator] = {
    gpu.name: gpu
    for gpu in (
        Accelerator("a100", flops=312e12, bandwidth=2.039e12, memory=80e9),
        Accelerator("h100", flops=989e12, bandwidth=3.35e12, memory=80e9),
        Accelerator("h200", flops=989e12, bandwidth=4.8e12, memory=141e9),
    )
}


@dataclass(frozen=True, slots=True)
class Link:
    """A path for KV: seconds before the first byte, seconds per descriptor, bytes/s."""

    setup: float = 0.0005
    per_descriptor: float = 2e-6
    bandwidth: float = 25e9


@dataclass(frozen=True, slots=True)
class Work:
    """What one engine step has to do: FLOPs, and bytes of KV to read beside the weights."""

    flops: float = 0.0
    kv_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Return the work of both in one step."""
        return Work(self.flops + other.flops, self.kv_bytes + other.kv_bytes)


def prefill_work(shape: ModelShape, new: int, cached: int) -> Work:
    """Return the work of computing ``new`` prompt tokens after ``cached`` ones.

    Two FLOPs per weight and token, and causal attention over what stands before each token (QK and AV, two FLOPs each):
    Mooncake, FAST'25, equation 1. Reading the cached KV counts too.
    """
    pairs = new * cached + new * new / 2
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    return Work(2 * shape.parameters * new + attention, float(kv_bytes_per_token(shape) * cached))


def decode_work(shape: ModelShape, context: int) -> Work:
    """Return the work of one more token for a request with ``context`` tokens: prefill of one token."""
    return prefill_work(shape, 1, context)


def step_seconds(shape: ModelShape, gpu: Accelerator, work: Work, gpus: int = 1) -> float:
    """Return the time of one engine step that does ``work`` on ``gpus`` GPUs.

    The weights are read once per step whatever the batch: that is why batching decode is nearly free up to
    :func:`free_batch`. Communication between GPUs is left out.
    """
    arithmetic = work.flops / (gpus * gpu.flops * gpu.flops_share)
    traffic = (shape.parameters * shape.weight_bytes + work.kv_bytes) / (gpus * gpu.bandwidth * gpu.bandwidth_share)
    return gpu.overhead + max(arithmetic, traffic)


def free_batch(gpu: Accelerator, weight_bytes: int = 2) -> float:
    """Return the tokens per step at which reading the weights stops being the bottleneck (at the peaks)."""
    return gpu.flops * weight_bytes / (2 * gpu.bandwidth)


def transfer_seconds(link: Link, size: int, descriptors: int) -> float:
    """Return the time to move ``size`` bytes in ``descriptors`` pieces.

    Small pieces cost more than bytes do (vLLM RFC 50913: tens of thousands of 8 KB descriptors for one 5k-token pull).
    """
    return link.setup + descriptors * link.per_descriptor + size / link.bandwidth
