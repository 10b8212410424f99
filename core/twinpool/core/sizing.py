"""Whether a model fits on GPUs when it is split over them: weights, KV cache and activations of one GPU, in bytes.

Everything follows from the model's ``config.json`` and data sheets. Estimates, never measurements: what an engine has
left, its log says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.core.communication import ACTIVATION_BYTES, COMBINE_BYTES, DISPATCH_BYTES
from twinpool.core.kv import kv_bytes_per_token_per_gpu

if TYPE_CHECKING:
    from twinpool.core.accelerators import Accelerator
    from twinpool.core.kv import ModelShape

#: Share of a GPU's memory that vLLM takes (its default ``--gpu-memory-utilization``).
UTILISATION = 0.9
#: Prompt tokens of one engine step, which decide the memory for activations (vLLM's default with chunked prefill).
STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs of one replica.

    ``tensor`` share every layer, ``pipeline`` stages follow each other, ``data`` copies of the attention have their own
    requests; with ``expert`` whole experts are spread over ``tensor x data`` GPUs, otherwise each is cut into parts.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False

    @property
    def gpus(self) -> int:
        """Return the GPUs of one replica."""
        return self.tensor * self.pipeline * self.data

    @property
    def ranks(self) -> int:
        """Return the GPUs that a layer's experts are on."""
        return self.tensor * self.data

    def __str__(self) -> str:
        """Return how people write it."""
        data = f" x data {self.data}" if self.data > 1 else ""
        return (
            f"tensor {self.tensor} x pipeline {self.pipeline}{data}{' with expert parallelism' if self.expert else ''}"
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked for: tokens of a request, of which ``answer`` are written, and requests at once on one replica.

    ``ttft`` and ``itl`` are the objectives in seconds; ``redundant`` copies of experts are kept in each layer.
    """

    context: int = 8192
    concurrency: int = 32
    ttft: float = 2.0
    itl: float = 0.05
    answer: int = 0
    redundant: int = 0

    @property
    def prompt(self) -> int:
        """Return the tokens that are read."""
        return max(1, self.context - self.answer)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each GPU, and the ``room`` there is; ``redundant`` is what copies of experts take of the weights."""

    weights: float
    redundant: float
    kv: float
    activations: float
    room: float
    #: Bytes of one request's KV on each GPU that holds it.
    request: float

    @property
    def lacking(self) -> float:
        """Return the bytes that are missing; at most 0 when all fits."""
        return self.weights + self.kv + self.activations - self.room

    @property
    def fits(self) -> bool:
        """Return whether weights, KV cache and activations have room."""
        return self.lacking <= 0

    @property
    def requests(self) -> int:
        """Return how many requests have room on each GPU beside weights and activations."""
        return max(0, int((self.room - self.weights - self.activations) / self.request))


def memory(shape: ModelShape, gpu: Accelerator, split: Split, work: Workload) -> Memory:
    """Return what one GPU holds of a split, with ``work.concurrency`` requests at once on the replica."""
    experts, redundant = _experts(shape, split, work)
    request = work.context * kv_bytes_per_token_per_gpu(shape, split.tensor) / split.pipeline
    return Memory(
        weights=shape.dense * shape.weight_bytes / (split.tensor * split.pipeline) + experts,
        redundant=redundant,
        kv=-(-work.concurrency // split.data) * request,
        activations=_activations(shape, split),
        room=gpu.memory * UTILISATION,
        request=request,
    )


def _experts(shape: ModelShape, split: Split, work: Workload) -> tuple[float, float]:
    """Return the bytes of routed experts on one GPU, and those of them that redundant copies take."""
    if shape.experts is None:
        return 0.0, 0.0
    one = shape.experts.layers * shape.experts.parameters * shape.weight_bytes / split.pipeline
    if not split.expert:
        return shape.experts.count * one / split.ranks, 0.0
    with_copies = shape.experts.held(split.ranks, work.redundant)
    return with_copies * one, (with_copies - shape.experts.held(split.ranks)) * one


def _activations(shape: ModelShape, split: Split) -> float:
    """Return the bytes of a full step: input, output and two inner rows of a token, which tensor parallelism splits.

    Expert parallelism keeps buffers for what is sent to experts and back.
    """
    inner = shape.inner or 4 * shape.hidden
    row = 2 * shape.hidden + 2 * inner / split.tensor
    size = STEP_TOKENS * row * max(ACTIVATION_BYTES, shape.weight_bytes)
    if shape.experts is not None and split.expert:
        size += STEP_TOKENS * shape.experts.per_token * shape.hidden * (DISPATCH_BYTES + COMBINE_BYTES) / split.tensor
    return size
