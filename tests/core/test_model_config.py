"""Shapes from the published ``config.json`` of each kind of model, against what their cards and papers print.

``configs/`` holds the entries of those files that decide size and time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twinpool.core.errors import InvalidValue
from twinpool.core.kv import kv_bytes_per_token
from twinpool.core.model_config import shape_of


def config(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())
    return found


LLAMA = config("llama-3-70b")


@pytest.mark.parametrize(
    ("name", "billions", "active", "kv"),
    [
        ("llama-3-70b", 70.6, 70.6, 327_680),
        ("mixtral-8x7b", 46.7, 12.9, 131_072),  # arXiv 2401.04088
        ("qwen3-235b-a22b", 235.0, 22.0, 192_512),
        ("qwen3-30b-a3b", 30.5, 3.3, 98_304),
        ("deepseek-v3", 671.0, 37.0, 70_272),  # arXiv 2412.19437
        ("deepseek-v2-lite", 15.7, 2.4, 31_104),  # arXiv 2405.04434, appendix B
        ("qwen1.5-moe-a2.7b", 14.3, 2.7, 196_608),
    ],
)
def test_a_model_has_the_weights_that_its_card_prints(name: str, billions: float, active: float, kv: int) -> None:
    shape = shape_of(config(name), name)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    # Cards count embeddings among active weights or do not; both are within a seventh.
    assert shape.active / 1e9 == pytest.approx(active, rel=0.15)
    assert kv_bytes_per_token(shape) == kv


def test_what_a_shape_takes_over() -> None:
    shape = shape_of(LLAMA, "llama")
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.weight_bytes) == (80, 64, 8, 128, 2)
    assert (shape.hidden, shape.inner, shape.experts, shape.latent) == (8192, 28672, None, None)
    tied = shape_of({**LLAMA, "tie_word_embeddings": True, "torch_dtype": "float32", "head_dim": 64}, "x")
    assert tied.parameters < shape.parameters
    assert (tied.weight_bytes, tied.head_dim, tied.hidden) == (4, 64, 8192)
    assert shape_of({key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}, "x").kv_heads == 64
    assert shape_of({"text_config": LLAMA}, "x") == shape_of(LLAMA, "x")


def test_latent_attention_and_fp8_of_deepseek() -> None:
    shape = shape_of(config("deepseek-v3"), "ds")
    assert (shape.latent, shape.head_dim, shape.weight_bytes, shape.hidden) == (576, 160, 1, 7168)
    assert shape.experts is not None
    assert (shape.experts.count, shape.experts.per_token, shape.experts.layers) == (256, 8, 58)
    assert shape.inner == 9 * 2048, "eight routed experts and a shared one"


def test_only_some_layers_may_have_experts() -> None:
    sparse = {**config("qwen3-30b-a3b"), "decoder_sparse_step": 2, "mlp_only_layers": [1, 3]}
    shape = shape_of(sparse, "x")
    assert shape.experts is not None
    assert shape.experts.layers == 22
    one = {**LLAMA, "num_experts": 1}
    assert shape_of(one, "x").experts is None, "one expert is a plain MLP"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"num_hidden_layers": 2}, "x has no hidden_size"),
        ({key: LLAMA[key] for key in LLAMA if key != "intermediate_size"}, "x has no intermediate_size"),
        ({**LLAMA, "num_local_experts": 8}, "x has no num_experts_per_tok"),
        (
            {**LLAMA, "quantization_config": {"quant_method": "awq"}},
            "quantised by 'awq' .* without quantization_config",
        ),
    ],
)
def test_what_cannot_be_sized_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        shape_of(given, "x")
