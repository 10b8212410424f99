"""What fits on GPUs and what a split yields, against numbers that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.core.errors import InvalidValue
from twinpool.core.kv import SHAPES
from twinpool.core.sizing import Network, Split, Workload, option, options, shape_of
from twinpool.core.timing import ACCELERATORS

#: Of Llama 3 70B, as published.
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
LLAMA = SHAPES["llama-3-70b"]
H100 = ACCELERATORS["h100"]


def test_a_shape_from_a_config() -> None:
    shape = shape_of(CONFIG, "llama")
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.weight_bytes) == (80, 64, 8, 128, 2)
    assert shape.parameters == pytest.approx(LLAMA.parameters, rel=0.01)
    tied = shape_of({**CONFIG, "tie_word_embeddings": True, "torch_dtype": "float32", "head_dim": 64}, "x")
    assert tied.parameters < shape.parameters
    assert (tied.weight_bytes, tied.head_dim) == (4, 64)
    assert shape_of({key: CONFIG[key] for key in CONFIG if key != "num_key_value_heads"}, "x").kv_heads == 64


@pytest.mark.parametrize(
    ("config", "words"),
    [({"num_hidden_layers": 2}, "x has no hidden_size"), ({**CONFIG, "num_local_experts": 8}, "mixture of experts")],
)
def test_what_cannot_be_sized_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        shape_of(config, "x")


def test_memory_of_a_split() -> None:
    work = Workload(context=8192, concurrency=16)
    one = option(LLAMA, H100, Split(1), work, Network())
    assert one.weights == pytest.approx(141.2e9)
    assert not one.fits, "141 GB on a GPU of 80 GB"
    eight = option(LLAMA, H100, Split(8), work, Network())
    assert eight.kv == pytest.approx(16 * 8192 * 327_680 / 8)
    assert eight.fits
    assert option(LLAMA, H100, Split(4, 2), work, Network()).weights == eight.weights


def test_what_is_legal_but_poor_is_warned_about() -> None:
    wide = option(LLAMA, H100, Split(16), Workload(), Network())
    assert wide.warnings == (
        "8 KV heads on 16 GPUs: the KV cache is kept more than once",
        "every layer talks across nodes; keep it inside one NVLink domain",
    )
    assert option(LLAMA, H100, Split(8), Workload(), Network()).warnings == ()
    apart = option(LLAMA, H100, Split(16), Workload(), Network(across=1e9))
    assert wide.prefill > apart.prefill, "a slow network costs"


def test_an_objective_that_cannot_be_met_yields_nothing() -> None:
    strict = option(LLAMA, H100, Split(8), Workload(itl=0.001, ttft=0.01), Network())
    assert (strict.prefill, strict.decode) == (0.0, 0.0)


def test_splits_are_ranked_by_what_each_gpu_decodes() -> None:
    found = options(LLAMA, H100, Workload(), Network())
    assert found
    assert all(item.fits for item in found)
    rates = [item.decode for item in found]
    assert rates == sorted(rates, reverse=True)
    assert all(item.split.gpus >= 4 for item in found)
    assert options(SHAPES["llama-3-8b"], H100, Workload(), Network(), most=1)[0].split == Split(1)
    assert all(9 % item.split.tensor == 0 for item in options(SHAPES["smollm2-135m"], H100, Workload(), Network()))
