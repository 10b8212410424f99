"""What parallel ranks pay to talk, against published numbers and in the directions that physics allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.accelerators import ACCELERATORS
from twinpool.core.communication import (
    Wire,
    all_reduce_seconds,
    all_to_all_seconds,
    expert_seconds,
    pipeline_bubble,
    pipeline_seconds,
    tensor_seconds,
)
from twinpool.core.experts import Experts
from twinpool.core.kv import SHAPES, ModelShape
from twinpool.core.timing import Work, decode_work, prefill_work, step_seconds

LLAMA = SHAPES["llama-3-70b"]
NVLINK = Wire(450e9, 1e-6)
#: DeepSeek-V3 by its config.json: 58 MoE layers of 256 experts of three 7168 x 2048 matrices, 8 for each token.
DEEPSEEK = ModelShape(
    "deepseek-v3",
    layers=61,
    heads=128,
    kv_heads=128,
    head_dim=160,
    parameters=671e9,
    weight_bytes=1,
    latent=576,
    width=7168,
    experts=Experts(count=256, per_token=8, layers=58, parameters=3 * 7168 * 2048),
)
sizes = st.floats(1, 1e10)
ranks = st.integers(1, 64)


@pytest.mark.parametrize(
    ("bandwidth", "microseconds", "milliseconds"),
    [(50e9, 120.96, 14.76), (900e9, 6.72, 0.82)],
    ids=["400 Gbit/s InfiniBand", "GB200 NVL72"],
)
def test_expert_traffic_takes_what_deepseek_publishes(bandwidth, microseconds, milliseconds):
    # DeepSeek-V3, ISCA'25, section 2.3.2: 32 tokens on each GPU, 8 routed and one shared expert, hidden size 7K; two
    # such exchanges in each of 61 layers bound the time of a token.
    wire, many = Wire(bandwidth), 1_000_000
    layer = all_to_all_seconds(32, 9, 7000, many, wire)
    assert layer * 1e6 == pytest.approx(microseconds, rel=0.001)
    assert 2 * 61 * layer * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_a_large_all_reduce_is_a_ring_and_a_small_one_a_single_step():
    assert all_reduce_seconds(1e9, 8, NVLINK) == pytest.approx(2 * 7 / 8 * 1e9 / 450e9, rel=0.01)
    assert all_reduce_seconds(1e3, 8, NVLINK) == pytest.approx(1e-6 + 7e3 / 450e9)


@given(size=sizes, count=ranks)
def test_an_all_reduce_grows_with_its_bytes_and_never_beats_the_bound(size, count):
    # Every byte leaves and comes back: 2 (r-1)/r is the least for any algorithm (Patarasuk and Yuan, 2009).
    seconds = all_reduce_seconds(size, count, NVLINK)
    assert seconds >= 2 * (count - 1) / count * size / NVLINK.bandwidth * (1 - 1e-9)
    assert all_reduce_seconds(2 * size, count, NVLINK) >= seconds
    assert all_reduce_seconds(size, count, Wire(50e9, 1e-6)) >= seconds


def test_tensor_parallelism_reduces_twice_in_each_layer():
    one = all_reduce_seconds(32 * 8192 * 2, 8, NVLINK)
    assert tensor_seconds(LLAMA, 32, 8, NVLINK) == pytest.approx(2 * 80 * one)
    assert tensor_seconds(LLAMA, 32, 1, NVLINK) == 0.0


def test_experts_talk_in_the_layers_that_have_them():
    layer = all_to_all_seconds(32, 8, 7168, 32, NVLINK)
    assert expert_seconds(DEEPSEEK, 32, 32, NVLINK) == pytest.approx(58 * layer)
    assert expert_seconds(DEEPSEEK, 32, 1, NVLINK) == 0.0
    assert expert_seconds(LLAMA, 32, 8, NVLINK) == 0.0


def test_stages_pass_activations_on_and_wait_for_each_other():
    assert pipeline_seconds(LLAMA, 100, 4, NVLINK) == pytest.approx(3 * (1e-6 + 100 * 8192 * 2 / 450e9))
    assert pipeline_seconds(LLAMA, 100, 1, NVLINK) == 0.0
    assert pipeline_bubble(4, 12) == pytest.approx(0.2)  # GPipe: small from four times as many batches as stages on
    assert pipeline_bubble(1, 5) == 0.0


def test_a_token_of_deepseek_computes_with_37_billion_weights():
    assert DEEPSEEK.active == pytest.approx(37e9, rel=0.03)
    assert DEEPSEEK.experts.total == pytest.approx(654e9, rel=0.01)


def test_a_batch_reads_the_experts_that_it_touches():
    experts = DEEPSEEK.experts
    assert experts.touched(1) == pytest.approx(8)
    assert experts.touched(32) == pytest.approx(256 * (1 - (248 / 256) ** 32))
    assert experts.touched(1e6) == pytest.approx(256)
    assert DEEPSEEK.read(1e6) == pytest.approx(671e9)
    gpu = ACCELERATORS["h200"]
    one, many = decode_work(DEEPSEEK, 0), sum((decode_work(DEEPSEEK, 0) for _ in range(32)), Work())
    few = step_seconds(DEEPSEEK, gpu, one, 8) - gpu.overhead
    assert few == pytest.approx(37e9 / (8 * 4.8e12 * 0.6), rel=0.03)
    assert step_seconds(DEEPSEEK, gpu, many, 8) > 8 * few, "batching a mixture is not free until it touches all"


@pytest.mark.parametrize(("ranks", "each"), [(32, 9), (144, 2), (320, 1)], ids=["EP32", "EP144", "EP320"])
def test_each_gpu_holds_as_many_experts_as_deepseek_says(ranks, each):
    # open-infra-index, day 6: 32 redundant experts; the report of 2024 has one for each of 320 GPUs.
    assert DEEPSEEK.experts.held(ranks, 32) == each


def test_heads_are_as_wide_as_a_latent_while_tokens_are_written():
    attention = decode_work(DEEPSEEK, 1000).flops - 2 * DEEPSEEK.active
    assert attention == pytest.approx(4 * 61 * 128 * (576 * 1000 + 160 / 2))


def test_what_deepseek_serves_lies_below_the_peaks_and_not_far_below():
    # open-infra-index, day 6: an H800 node (the arithmetic of an H100) reads 73.7k tokens/s, of which 56.3 % were
    # cached, and writes 14.8k.
    node, read = 8 * ACCELERATORS["h100"].fp8, 73_700 * (1 - 0.563)
    assert 0.05 < read * prefill_work(DEEPSEEK, 1, 2500).flops / node < 1
    assert 0.03 < 14_800 * decode_work(DEEPSEEK, 4989).flops / node < 1
