"""KV sizes against the numbers that papers and engines publish."""

import pytest

from twinpool.core.kv import SHAPES, ModelShape, kv_bytes_per_token, kv_bytes_per_token_per_gpu

DEEPSEEK_V3 = ModelShape(
    "deepseek-v3", layers=61, heads=128, kv_heads=128, head_dim=128, parameters=671e9, latent=512 + 64
)


@pytest.mark.parametrize(
    ("shape", "published"),
    [
        (SHAPES["llama-3-8b"], 131_072),  # llm-d counts 128 KiB
        (SHAPES["llama-3-70b"], 327_680),  # Mooncake counts 320 KiB
        (SHAPES["qwen3-32b"], 262_144),
        (DEEPSEEK_V3, 70_272),  # the DeepSeek ISCA'25 paper says 70 KB
    ],
    ids=lambda value: value.name if isinstance(value, ModelShape) else str(value),
)
def test_one_token_takes_the_published_bytes(shape, published):
    assert kv_bytes_per_token(shape) == published


def test_a_mean_conversation_of_the_mooncake_trace_takes_four_gigabytes():
    assert kv_bytes_per_token(SHAPES["llama-3-70b"]) * 12_035 == pytest.approx(3.94e9, rel=0.01)


@pytest.mark.parametrize(("tensor", "share"), [(1, 1), (2, 2), (4, 4), (8, 8), (16, 8)])
def test_tensor_parallelism_shrinks_the_cache_until_heads_are_replicated(tensor, share):
    shape = SHAPES["llama-3-70b"]
    assert kv_bytes_per_token_per_gpu(shape, tensor) == kv_bytes_per_token(shape) // share


def test_a_latent_is_replicated_on_every_gpu():
    assert kv_bytes_per_token_per_gpu(DEEPSEEK_V3, 8) == kv_bytes_per_token(DEEPSEEK_V3)


def test_every_shape_is_found_by_its_own_name():
    assert all(name == shape.name for name, shape in SHAPES.items())
