"""How long prefill, a decode step and a KV transfer take. Pure arithmetic; all times in seconds.

A roofline: a step takes as long as its arithmetic or its memory traffic, whichever is longer, at the share of the peak
that engines reach. Good for ranking and for simulation; what it says is never a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twinpool.core.accelerators import ACCELERATORS as ACCELERATORS
from twinpool.core.accelerators import Accelerator as Accelerator  # noqa: TC001 - others take it from here
from twinpool.core.kv import ModelShape, kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class Link:
    """A path for KV: seconds before the first byte, seconds per descriptor, bytes/s."""

    setup: float = 0.0005
    per_descriptor: float = 2e-6
    bandwidth: float = 25e9


@dataclass(frozen=True, slots=True)
class Work:
    """What one engine step has to do: FLOPs, bytes of KV to read beside the weights, and tokens to compute."""

    flops: float = 0.0
    kv_bytes: float = 0.0
    tokens: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Return the work of both in one step."""
        return Work(self.flops + other.flops, self.kv_bytes + other.kv_bytes, self.tokens + other.tokens)


def prefill_work(shape: ModelShape, new: int, cached: int) -> Work:
    """Return the work of computing ``new`` prompt tokens after ``cached`` ones.

    Two FLOPs per weight that a token computes with, and causal attention over what stands before each token (QK and AV,
    two FLOPs each): Mooncake, FAST'25, equation 1. Reading the cached KV counts too.
    """
    pairs = new * cached + new * new / 2
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    return Work(2 * shape.active * new + attention, float(kv_bytes_per_token(shape) * cached), float(new))


def decode_work(shape: ModelShape, context: int) -> Work:
    """Return the work of one more token for a request with ``context`` tokens: prefill of one token.

    Under latent attention engines then compare with the latents themselves, so each head is as wide as a latent
    (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
    """
    one = prefill_work(shape, 1, context)
    if shape.latent is None:
        return one
    wider = 4 * shape.layers * shape.heads * (shape.latent - shape.head_dim) * context
    return replace(one, flops=one.flops + wider)


def step_seconds(shape: ModelShape, gpu: Accelerator, work: Work, gpus: int = 1) -> float:
    """Return the time of one engine step that does ``work`` on ``gpus`` GPUs.

    The weights are read once per step whatever the batch: that is why batching decode is nearly free up to
    :func:`free_batch`. Of a mixture only the experts that the step's tokens are sent to are read. Communication between
    GPUs is left out (:mod:`twinpool.core.communication`).
    """
    arithmetic = work.flops / (gpus * gpu.peak(shape.weight_bytes) * gpu.flops_share)
    read = shape.read(work.tokens) * shape.weight_bytes + work.kv_bytes
    traffic = read / (gpus * gpu.bandwidth * gpu.bandwidth_share)
    return gpu.overhead + max(arithmetic, traffic)


def free_batch(gpu: Accelerator, weight_bytes: int = 2) -> float:
    """Return the tokens per step at which reading the weights stops being the bottleneck (at the peaks)."""
    return gpu.peak(weight_bytes) * weight_bytes / (2 * gpu.bandwidth)


def transfer_seconds(link: Link, size: int, descriptors: int) -> float:
    """Return the time to move ``size`` bytes in ``descriptors`` pieces.

    Small pieces cost more than bytes do (vLLM RFC 50913: tens of thousands of 8 KB descriptors for one 5k-token pull).
    """
    return link.setup + descriptors * link.per_descriptor + size / link.bandwidth
