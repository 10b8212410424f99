"""Whether a model fits on GPUs when it is split over them, and which split serves most: estimates, never measurements.

Everything is per GPU and follows from the model's ``config.json`` and data sheets. Dense decoders only: what a
mixture of experts reads per step depends on its traffic, and is refused rather than guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinpool.core.communication import Wire, tensor_seconds
from twinpool.core.errors import InvalidValue
from twinpool.core.kv import ModelShape, kv_bytes_per_token_per_gpu
from twinpool.core.timing import Accelerator, decode_work, prefill_work, step_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Share of a GPU's memory that vLLM takes (its default ``--gpu-memory-utilization``).
UTILISATION = 0.9
#: Prompt tokens of one engine step, which decide the memory for activations (vLLM's default with chunked prefill).
STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs of one replica: ``tensor`` share every layer, ``pipeline`` stages follow each other."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def gpus(self) -> int:
        """Return the GPUs of one replica."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked for: tokens of a request, requests at once on one replica, and the objectives in seconds."""

    context: int = 8192
    concurrency: int = 32
    ttft: float = 2.0
    itl: float = 0.05


@dataclass(frozen=True, slots=True)
class Network:
    """GPUs of a node, and bytes/s between two GPUs inside one and across two."""

    per_node: int = 8
    inside: float = 450e9
    across: float = 50e9


@dataclass(frozen=True, slots=True)
class Option:
    """One split: bytes on each GPU, and tokens/s of prefill and decode for each GPU within the objectives."""

    split: Split
    weights: float
    kv: float
    activations: float
    room: float
    prefill: float
    decode: float
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Return whether weights, KV cache and activations have room."""
        return self.weights + self.kv + self.activations <= self.room


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a dense decoder from its ``config.json``.

    Weights are counted for a gated MLP (three matrices), as all current dense decoders have.

    Raises
    ------
    InvalidValue
        When a number is missing, or the model is a mixture of experts.
    """
    if any(key in config for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise InvalidValue(f"{name} is a mixture of experts", "sizes are estimated for dense models only")
    try:
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads, inner = int(config["num_attention_heads"]), int(config["intermediate_size"])
        vocabulary = int(config["vocab_size"])
    except KeyError as error:
        raise InvalidValue(f"{name} has no {error.args[0]}", "give the config.json of a decoder model") from None
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    parameters = embeddings + layers * (attention + 3 * hidden * inner)
    weight_bytes = 4 if config.get("torch_dtype") == "float32" else 2
    return ModelShape(name, layers, heads, kv_heads, head_dim, float(parameters), weight_bytes)


def option(shape: ModelShape, gpu: Accelerator, split: Split, work: Workload, network: Network) -> Option:
    """Return what a split needs and yields on this GPU and network."""
    hidden = shape.heads * shape.head_dim
    cached = kv_bytes_per_token_per_gpu(shape, split.tensor) / split.pipeline
    # In a layer's MLP a token has its input, its output, and two inner rows, which tensor parallelism splits; the inner
    # size is about four times the hidden one.
    row = (2 + 8 / split.tensor) * hidden * shape.weight_bytes
    prefill, decode = _rates(shape, gpu, split, work, network)
    return Option(
        split=split,
        weights=shape.parameters * shape.weight_bytes / split.gpus,
        kv=work.concurrency * work.context * cached,
        activations=STEP_TOKENS * row,
        room=gpu.memory * UTILISATION,
        prefill=prefill,
        decode=decode,
        warnings=_warnings(shape, split, network),
    )


def _rates(shape: ModelShape, gpu: Accelerator, split: Split, work: Workload, network: Network) -> tuple[float, float]:
    """Return prefill and decode tokens/s for each GPU, 0 where an objective cannot be met.

    Pipeline stages work on different batches, so a replica has one batch in each stage; a token passes all of them.
    """
    prompt = step_seconds(shape, gpu, prefill_work(shape, work.context, 0), split.gpus)
    prompt += _reducing(shape, split, work.context, network)
    step = decode_work(shape, work.context)
    batch = max(1, work.concurrency // split.pipeline)
    whole = type(step)(step.flops * batch, step.kv_bytes * batch)
    token = step_seconds(shape, gpu, whole, split.gpus) + _reducing(shape, split, batch, network)
    latency, between = prompt * split.pipeline, token * split.pipeline
    prefill = work.context / prompt / split.gpus if latency <= work.ttft else 0.0
    return prefill, batch / token / split.gpus if between <= work.itl else 0.0


def _reducing(shape: ModelShape, split: Split, tokens: int, network: Network) -> float:
    """Return the seconds of the all-reduces of one step, over the stages' own layers."""
    wire = Wire(network.inside if split.tensor <= network.per_node else network.across)
    return tensor_seconds(shape, tokens, split.tensor, wire) / split.pipeline


def _warnings(shape: ModelShape, split: Split, network: Network) -> tuple[str, ...]:
    found = []
    if split.tensor > shape.kv_heads:
        found.append(f"{shape.kv_heads} KV heads on {split.tensor} GPUs: the KV cache is kept more than once")
    if split.tensor > network.per_node:
        found.append("every layer talks across nodes; keep it inside one NVLink domain")
    return tuple(found)


def options(shape: ModelShape, gpu: Accelerator, work: Workload, network: Network, most: int = 32) -> list[Option]:
    """Return the splits that fit on at most ``most`` GPUs, those that decode most for each GPU first.

    Tensor parallelism must divide the attention heads, pipeline stages the layers (vLLM refuses the first and pads the
    second).
    """
    powers = [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= most]
    splits = [Split(tensor, pipeline) for tensor in powers for pipeline in powers if tensor * pipeline <= most]
    able = [split for split in splits if shape.heads % split.tensor == 0 and shape.layers % split.pipeline == 0]
    found = [option(shape, gpu, split, work, network) for split in able]
    return sorted((item for item in found if item.fits), key=lambda item: (-item.decode, item.split.gpus))
