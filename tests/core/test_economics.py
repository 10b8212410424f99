"""Prices equal the roofline, agree with published thresholds, and go the way that physics goes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.economics import ASSUMED, prices_of
from twinpool.core.experts import Experts
from twinpool.core.kv import SHAPES, kv_bytes_per_token
from twinpool.core.timing import (
    ACCELERATORS,
    Accelerator,
    Link,
    Work,
    decode_work,
    prefill_work,
    step_seconds,
    transfer_seconds,
)

LLAMA_70B = SHAPES["llama-3-70b"]
tokens = st.integers(1, 100_000)
shapes = st.sampled_from(sorted(SHAPES))
gpus = st.integers(1, 16)


@given(shape=shapes, gpu=st.sampled_from(sorted(ACCELERATORS)), count=gpus, new=tokens, cached=st.integers(0, 100_000))
def test_a_prefill_costs_what_the_roofline_says(shape, gpu, count, new, cached):
    prices = prices_of(SHAPES[shape], ACCELERATORS[gpu], count)
    expected = step_seconds(SHAPES[shape], ACCELERATORS[gpu], prefill_work(SHAPES[shape], new, cached), count)
    assert prices.prefill(new, cached) == pytest.approx(expected)


@given(shape=shapes, contexts=st.lists(tokens, min_size=1, max_size=50), new=tokens, cached=tokens)
def test_decode_and_mixed_steps_cost_what_the_roofline_says(shape, contexts, new, cached):
    model, gpu = SHAPES[shape], ACCELERATORS["h100"]
    prices = prices_of(model, gpu)
    work = sum((decode_work(model, context) for context in contexts), Work())
    assert prices.step(len(contexts), sum(contexts)) == pytest.approx(step_seconds(model, gpu, work))
    both = work + prefill_work(model, new, cached)
    mixed = prices.mixed(new, cached, len(contexts), sum(contexts))
    assert mixed == pytest.approx(step_seconds(model, gpu, both))


MIXTURE = replace(LLAMA_70B, parameters=671e9, experts=Experts(256, 8, 58, 44e6))


@given(new=tokens, cached=tokens, contexts=st.lists(tokens, min_size=1, max_size=50))
def test_a_step_of_a_mixture_reads_the_experts_that_its_tokens_are_sent_to(new, cached, contexts):
    gpu, batch, context = ACCELERATORS["h200"], len(contexts), sum(contexts)
    prices = prices_of(MIXTURE, gpu, 8)
    work = sum((decode_work(MIXTURE, each) for each in contexts), Work())
    prompt = prefill_work(MIXTURE, new, cached)
    assert prices.prefill(new, cached) == pytest.approx(step_seconds(MIXTURE, gpu, prompt, 8))
    assert prices.step(batch, context) == pytest.approx(step_seconds(MIXTURE, gpu, work, 8))
    assert prices.mixed(new, cached, batch, context) == pytest.approx(step_seconds(MIXTURE, gpu, work + prompt, 8))
    assert prices.scaled(2.0).step(batch, context) == pytest.approx(2 * prices.step(batch, context))


def test_drafts_of_a_mixture_read_more_experts():
    dense, mixed = (prices_of(shape, ACCELERATORS["h200"], 8) for shape in (LLAMA_70B, MIXTURE))
    # One sequence with three drafts reads the experts of four tokens, not those of one.
    assert mixed.verify(1, 3, 0) == pytest.approx(mixed.step(4, 0), rel=1e-3)
    assert mixed.verify(1, 3, 0) / mixed.step(1, 0) > 1.5
    assert dense.verify(1, 3, 0) / dense.step(1, 0) < 1.1


def test_a_pull_costs_what_the_link_says():
    link = Link(setup=0.1, per_descriptor=1e-5, bandwidth=1e9)
    prices = prices_of(LLAMA_70B, ACCELERATORS["h100"], 8, link, block_size=16)
    size = kv_bytes_per_token(LLAMA_70B) * 1600
    assert prices.pull(1600) == pytest.approx(transfer_seconds(link, size, 2 * LLAMA_70B.layers * 100))


@pytest.mark.parametrize(("peak", "published"), [(312e12, 6e9), (989e12, 19e9)], ids=["8 x A800", "8 x H800"])
def test_loading_beats_computing_from_about_the_bandwidth_that_mooncake_publishes(peak, published):
    # Mooncake, FAST'25, equation 2: 6 and 19 GB/s for a prefix of 8192 tokens of LLaMA-3-70B, at the peak FLOP/s. It
    # counts attention without the causal half and fewer weights; we come out 10 % lower.
    gpu = Accelerator("a", flops=peak, bandwidth=1e15, flops_share=1.0, bandwidth_share=1.0, overhead=0.0)
    compute = prices_of(LLAMA_70B, gpu, 8).prefill(8192, 0)
    assert kv_bytes_per_token(LLAMA_70B) * 8192 / compute == pytest.approx(published, rel=0.12)


def test_nothing_to_do_costs_nothing():
    assert ASSUMED.prefill(0, 100) == ASSUMED.step(0, 0) == ASSUMED.pull(0) == 0
    assert ASSUMED.interference(100, 0, 0, 0) == ASSUMED.interference(0, 100, 8, 800) == 0


@given(new=tokens, batch=st.integers(1, 256), context=tokens)
def test_a_prefill_beside_decode_holds_each_sequence_up_but_less_than_its_own_step_would(new, batch, context):
    held_up = ASSUMED.interference(new, 0, batch, context)
    assert 0 <= held_up <= ASSUMED.prefill(new, 0)


@given(new=tokens, cached=tokens, batch=st.integers(0, 256), context=tokens, more=tokens)
@pytest.mark.parametrize("experts", [0.0, 0.004])
def test_what_a_whole_request_means_is_the_sum_of_its_parts(experts, new, cached, batch, context, more):
    prices = replace(ASSUMED, experts=experts, missed=0.9)
    parts = (
        prices.prefill(new, cached),
        prices.interference(new, cached, batch, context),
        prices.step(batch, context),
        prices.step(batch + 1, context + more),
    )
    assert prices.whole(new, cached, batch, context, more) == pytest.approx(parts, rel=1e-9, abs=1e-15)


def test_a_slower_tier_is_read_only_when_that_beats_computing():
    fast = prices_of(LLAMA_70B, ACCELERATORS["h100"], 8)
    slow_tier, quick_tier = replace(fast, load_token=1.0), replace(fast, load_token=1e-7)
    assert slow_tier.warm(1000, 100, 900) == fast.prefill(900, 100)
    assert quick_tier.warm(1000, 100, 900) == pytest.approx(800e-7 + fast.prefill(100, 900))
    assert fast.warm(1000, 900, 900) == fast.prefill(100, 900)


def test_scaling_changes_computing_alone():
    slower = ASSUMED.scaled(2.0)
    assert slower.prefill(1000, 50) == pytest.approx(2 * ASSUMED.prefill(1000, 50))
    assert slower.step(8, 800) == pytest.approx(2 * ASSUMED.step(8, 800))
    assert slower.pull(1000) == ASSUMED.pull(1000)
