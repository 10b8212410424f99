"""What fits on GPUs, against numbers that can be worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinpool.core.accelerators import ACCELERATORS
from twinpool.core.kv import SHAPES
from twinpool.core.model_config import shape_of
from twinpool.core.sizing import Split, Workload, memory

LLAMA = SHAPES["llama-3-70b"]
H100, H200 = ACCELERATORS["h100"], ACCELERATORS["h200"]
DEEPSEEK = shape_of(json.loads((Path(__file__).parent / "configs" / "deepseek-v3.json").read_text()), "ds")
MIXTRAL = shape_of(json.loads((Path(__file__).parent / "configs" / "mixtral-8x7b.json").read_text()), "mixtral")


def test_memory_of_a_dense_model() -> None:
    work = Workload(context=8192, concurrency=16)
    one = memory(LLAMA, H100, Split(1), work)
    assert one.weights == pytest.approx(141.2e9)
    assert not one.fits, "141 GB on a GPU of 80 GB"
    assert one.lacking == pytest.approx(one.weights + one.kv + one.activations - 72e9)
    assert one.requests == 0
    eight = memory(LLAMA, H100, Split(8), work)
    assert eight.kv == pytest.approx(16 * 8192 * 327_680 / 8)
    assert eight.fits
    assert eight.requests == int((72e9 - eight.weights - eight.activations) / (8192 * 327_680 / 8))
    assert memory(LLAMA, H100, Split(4, 2), work).weights == eight.weights
    assert memory(LLAMA, H100, Split(4, 2), work).kv == eight.kv
    # Input, output and two inner rows of 8192 tokens.
    assert one.activations == pytest.approx(8192 * (2 * 8192 + 2 * 4 * 8192) * 2)


def test_deepseek_needs_sixteen_h100_or_eight_h200() -> None:
    # As its model card and vLLM's recipes say of the FP8 weights.
    work = Workload(context=4096, concurrency=1)
    assert not memory(DEEPSEEK, H100, Split(8), work).fits
    assert memory(DEEPSEEK, H100, Split(16), work).fits
    assert memory(DEEPSEEK, H200, Split(8), work).fits


def test_experts_are_cut_or_spread_and_copies_cost_memory() -> None:
    work = Workload(concurrency=32)
    cut, spread = memory(DEEPSEEK, H200, Split(8), work), memory(DEEPSEEK, H200, Split(8, expert=True), work)
    assert spread.weights == pytest.approx(cut.weights)
    assert spread.activations > cut.activations, "buffers for what is sent to experts"
    copies = memory(DEEPSEEK, H200, Split(1, 1, 32, True), Workload(redundant=32))
    one = 58 * 3 * 7168 * 2048
    assert copies.redundant == pytest.approx(one), "nine experts for each GPU instead of eight"
    assert copies.weights == pytest.approx(DEEPSEEK.dense + 9 * one)
    assert memory(MIXTRAL, H100, Split(2), work).weights == pytest.approx(46.7e9, rel=0.01)
    assert memory(MIXTRAL, H100, Split(1, 2, 2), work).weights < memory(MIXTRAL, H100, Split(1, 2), work).weights


def test_a_latent_is_copied_by_tensor_and_shared_out_by_data_parallelism() -> None:
    work = Workload(context=8192, concurrency=33)
    whole = 70_272 * 8192
    assert memory(DEEPSEEK, H200, Split(8), work).kv == pytest.approx(33 * whole)
    assert memory(DEEPSEEK, H200, Split(1, 1, 8, True), work).kv == pytest.approx(5 * whole)


def test_how_a_split_and_a_request_are_told() -> None:
    assert str(Split(8, 2)) == "tensor 8 x pipeline 2"
    assert str(Split(1, 1, 32, True)) == "tensor 1 x pipeline 1 x data 32 with expert parallelism"
    assert (Split(2, 3, 4).gpus, Split(2, 3, 4).ranks) == (24, 8)
    assert Workload(context=100, answer=30).prompt == 70
    assert Workload(context=1, answer=30).prompt == 1
