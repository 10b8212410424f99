"""How large a KV cache is. Pure arithmetic over the shape of a model.

Every place that needs bytes of KV (plans, prices of a handoff, the simulated engine) asks here, so that there is one
answer. Sources are named at each formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinpool.core.experts import Experts


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a decoder that decide its time and memory.

    Parameters
    ----------
    layers, heads, kv_heads, head_dim:
        As in the model's ``config.json``; ``kv_heads`` below ``heads`` is grouped-query attention. Under latent
        attention ``head_dim`` is the mean of what queries and values have.
    parameters:
        Weights, embeddings and all experts included.
    weight_bytes, kv_bytes:
        Bytes of one weight and of one cached element (2: bfloat16).
    latent:
        Elements cached per token and layer under multi-head latent attention (rank + rotary part); None without.
    width:
        Elements of a token between layers; 0: ``heads x head_dim``, as most models have it.
    experts:
        The routed experts of a mixture; None: every token computes with all weights.
    inner:
        Elements of a token inside a layer's MLP, over the experts that it uses; 0: four times those between layers.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    weight_bytes: int = 2
    kv_bytes: int = 2
    latent: int | None = None
    width: int = 0
    experts: Experts | None = None
    inner: int = 0

    @property
    def hidden(self) -> int:
        """Return the elements of a token between layers."""
        return self.width or self.heads * self.head_dim

    @property
    def dense(self) -> float:
        """Return the weights that every token computes with: all but routed experts."""
        return self.parameters - (self.experts.total if self.experts else 0.0)

    @property
    def active(self) -> float:
        """Return the weights that one token computes with."""
        return self.read(1)

    def read(self, tokens: float) -> float:
        """Return the weights that a step of ``tokens`` reads: all but the experts that none of them is sent to."""
        if self.experts is None:
            return self.parameters
        unused = self.experts.count - self.experts.touched(tokens)
        return self.parameters - self.experts.layers * self.experts.parameters * unused


#: Shapes by name, from the models' published ``config.json``.
SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("smollm2-135m", layers=30, heads=9, kv_heads=3, head_dim=64, parameters=134.5e6),
        ModelShape("llama-3-8b", layers=32, heads=32, kv_heads=8, head_dim=128, parameters=8.03e9),
        ModelShape("qwen3-32b", layers=64, heads=64, kv_heads=8, head_dim=128, parameters=32.8e9),
        ModelShape("llama-3-70b", layers=80, heads=64, kv_heads=8, head_dim=128, parameters=70.6e9),
    )
}


def kv_bytes_per_token(shape: ModelShape) -> int:
    """Return the bytes that one token's KV holds once, over all GPUs, before any replication.

    Keys and values of every layer and KV head (Mooncake, FAST'25, section 2.2); under latent attention one latent per
    layer (DeepSeek-V3, ISCA'25).
    """
    if shape.latent is not None:
        return shape.layers * shape.latent * shape.kv_bytes
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * shape.kv_bytes


def kv_bytes_per_token_per_gpu(shape: ModelShape, tensor: int) -> int:
    """Return the bytes that one token's KV takes on each of ``tensor`` GPUs.

    With fewer KV heads than GPUs the heads are replicated, and a latent is replicated on every GPU: tensor parallelism
    then no longer shrinks the cache.
    """
    if shape.latent is not None:
        return kv_bytes_per_token(shape)
    heads = max(1, shape.kv_heads // tensor)
    return 2 * shape.layers * heads * shape.head_dim * shape.kv_bytes
