"""Step and transfer times against published numbers, and in the directions that physics allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.kv import SHAPES
from twinpool.core.timing import (
    ACCELERATORS,
    Link,
    Work,
    decode_work,
    free_batch,
    prefill_work,
    step_seconds,
    transfer_seconds,
)

LLAMA = SHAPES["llama-3-8b"]
H100 = ACCELERATORS["h100"]
tokens = st.integers(1, 100_000)


def test_weights_stop_being_free_at_295_tokens_on_an_h100():
    assert free_batch(H100) == pytest.approx(295, abs=0.5)


def test_prefill_counts_two_flops_per_weight_and_causal_attention():
    # Mooncake's equation with d = heads * head_dim: 4 * layers * d * (n * n / 2) beside the weights.
    assert prefill_work(LLAMA, 1000, 0).flops == pytest.approx(2 * 8.03e9 * 1000 + 4 * 32 * 4096 * 500_000)


def test_a_decode_step_of_one_request_is_as_long_as_reading_the_weights():
    step = step_seconds(LLAMA, H100, decode_work(LLAMA, 1000))
    assert step == pytest.approx(H100.overhead + (16.06e9 + 131_072 * 1000) / (3.35e12 * 0.6))


def test_a_long_prefill_is_bound_by_arithmetic():
    work = prefill_work(LLAMA, 8192, 0)
    assert step_seconds(LLAMA, H100, work) == pytest.approx(H100.overhead + work.flops / (989e12 * 0.5))


@given(new=tokens, cached=tokens)
def test_work_in_two_chunks_is_the_work_of_one(new, cached):
    whole = prefill_work(LLAMA, new + cached, 0).flops
    assert prefill_work(LLAMA, cached, 0).flops + prefill_work(LLAMA, new, cached).flops == pytest.approx(whole)


@given(new=tokens, cached=tokens, gpus=st.integers(1, 16))
def test_more_gpus_and_more_cached_tokens_never_take_longer(new, cached, gpus):
    work = prefill_work(LLAMA, new, 0)
    assert step_seconds(LLAMA, H100, work, gpus + 1) <= step_seconds(LLAMA, H100, work, gpus)
    assert prefill_work(LLAMA, new, cached).flops <= prefill_work(LLAMA, new + cached, 0).flops


def test_work_adds_up():
    assert Work(1, 2) + Work(10, 20) == Work(11, 22)


def test_a_transfer_pays_for_setup_descriptors_and_bytes():
    link = Link(setup=0.1, per_descriptor=0.01, bandwidth=100.0)
    assert transfer_seconds(link, size=50, descriptors=3) == pytest.approx(0.1 + 0.03 + 0.5)


def test_accelerators_are_found_by_their_own_name():
    assert all(name == gpu.name for name, gpu in ACCELERATORS.items())
