"""The shape of a decoder from its published ``config.json``: dense, mixtures of experts, latent attention.

Weights are counted matrix by matrix, so totals agree with what model cards print; norms and biases are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.core.errors import InvalidValue
from twinpool.core.experts import Experts
from twinpool.core.kv import ModelShape

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Keys for the routed experts of a layer: Mixtral; Qwen-MoE; DeepSeek, GLM and Kimi.
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
#: Bytes of a weight by ``quant_method``; others are refused rather than guessed.
_QUANTISED = {"fp8": 1, "fbgemm_fp8": 1}


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a decoder from its ``config.json`` (of a multimodal model: its text part).

    MLPs and experts are counted as gated (three matrices), as all current decoders have them.

    Raises
    ------
    InvalidValue
        When a number is missing, or weights are quantised in a way whose size is not known here.
    """
    config = config.get("text_config") or config
    try:
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        heads, vocabulary = int(config["num_attention_heads"]), int(config["vocab_size"])
        experts = _experts(config, layers, hidden)
        mlp = _mlp(config, layers, hidden, experts)
        attention, head_dim, latent = _attention(config, hidden, heads)
    except KeyError as error:
        raise InvalidValue(f"{name} has no {error.args[0]}", "give the config.json of a decoder model") from None
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return ModelShape(
        name,
        layers,
        heads,
        int(config.get("num_key_value_heads") or heads),
        head_dim,
        parameters=float(embeddings + layers * attention + mlp + (experts.total if experts else 0)),
        weight_bytes=_weight_bytes(config, name),
        latent=latent,
        width=hidden,
        experts=experts,
        inner=_inner(config, experts),
    )


def _experts(config: Mapping[str, Any], layers: int, hidden: int) -> Experts | None:
    count = next((int(config[key]) for key in _COUNTS if config.get(key)), 0)
    if count < 2:
        return None
    skipped = set(range(int(config.get("first_k_dense_replace") or 0))) | set(config.get("mlp_only_layers") or ())
    sparse = int(config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1)
    having = sum(layer not in skipped and (layer + 1) % sparse == 0 for layer in range(layers))
    per_token = int(config["num_experts_per_tok"])
    return Experts(count, per_token, having, 3 * hidden * float(_expert_inner(config)))


def _expert_inner(config: Mapping[str, Any]) -> int:
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])


def _shared_inner(config: Mapping[str, Any]) -> int:
    """Return the inner size of the experts of a layer that every token uses."""
    if given := config.get("shared_expert_intermediate_size"):
        return int(given)
    return int(config.get("n_shared_experts") or 0) * _expert_inner(config)


def _mlp(config: Mapping[str, Any], layers: int, hidden: int, experts: Experts | None) -> int:
    """Return the weights of dense MLPs, shared experts and routers, in all layers."""
    if experts is None:
        return layers * 3 * hidden * int(config["intermediate_size"])
    # With every layer a mixture the dense size is not needed, and may be missing.
    dense = (layers - experts.layers) * 3 * hidden * int(config["intermediate_size"]) if layers > experts.layers else 0
    return dense + experts.layers * hidden * (3 * _shared_inner(config) + experts.count)


def _inner(config: Mapping[str, Any], experts: Experts | None) -> int:
    """Return the elements that a token has inside one layer's MLP, over the experts that it uses."""
    if experts is None:
        return int(config["intermediate_size"])
    return experts.per_token * _expert_inner(config) + _shared_inner(config)


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int, int | None]:
    """Return the weights of one layer's attention, the size of a head, and the latent's elements if there is one.

    Latent attention: DeepSeek-V2 (arXiv 2405.04434), section 2.1; queries may have a latent of their own.
    """
    if rank := config.get("kv_lora_rank"):
        rope, nope = int(config["qk_rope_head_dim"]), int(config["qk_nope_head_dim"])
        value, query = int(config["v_head_dim"]), config.get("q_lora_rank")
        asking = hidden * query + query * heads * (nope + rope) if query else hidden * heads * (nope + rope)
        keeping = hidden * (rank + rope) + rank * heads * (nope + value)
        return asking + keeping + heads * value * hidden, (nope + rope + value) // 2, rank + rope
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    return 2 * hidden * head_dim * (heads + kv_heads), head_dim, None


def _weight_bytes(config: Mapping[str, Any], name: str) -> int:
    if method := (config.get("quantization_config") or {}).get("quant_method"):
        if method not in _QUANTISED:
            raise InvalidValue(
                f"the size of weights quantised by {method!r} ({name}) is not known here",
                f"give a config.json without quantization_config, or one of {', '.join(_QUANTISED)}",
            )
        return _QUANTISED[method]
    return 4 if (config.get("torch_dtype") or config.get("dtype")) == "float32" else 2
