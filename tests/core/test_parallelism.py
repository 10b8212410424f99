"""Which split serves most: against what DeepSeek runs and measured, by hand, and the way that physics goes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.accelerators import ACCELERATORS
from twinpool.core.communication import Wire, tensor_seconds
from twinpool.core.kv import SHAPES, ModelShape
from twinpool.core.model_config import shape_of
from twinpool.core.parallelism import Network, option, options, prefill_per_decode, problems
from twinpool.core.queueing import mean_wait
from twinpool.core.sizing import Split, Workload
from twinpool.core.timing import decode_work, prefill_work, step_seconds

LLAMA, H100, H200 = SHAPES["llama-3-70b"], ACCELERATORS["h100"], ACCELERATORS["h200"]


def shape(name: str) -> ModelShape:
    return shape_of(json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text()), name)


DEEPSEEK, QWEN, MIXTRAL = shape("deepseek-v3"), shape("qwen3-235b-a22b"), shape("mixtral-8x7b")
#: An H800 node: NVLink of 400 GB/s in both directions together, 400 Gbit/s for each GPU.
H800_NODES = Network(8, 200e9, 50e9)


def test_what_deepseek_serves_is_foreseen_within_a_quarter() -> None:
    # open-infra-index, day 6: 73.7k tokens/s read by a node (56.3 % of them cached), 14.8k written, 20 to 22 for each
    # user, mean context 4,989; 32 GPUs for prefill and 144 for decode, 32 copies of experts.
    work = Workload(context=4989, concurrency=1, ttft=5.0, itl=1 / 21, redundant=32)
    prefill = option(DEEPSEEK, H100, Split(1, 1, 32, expert=True), work, H800_NODES)
    decode = option(DEEPSEEK, H100, Split(1, 1, 144, expert=True), work, H800_NODES)
    assert prefill.feasible
    assert decode.feasible
    assert 8 * prefill.prefill == pytest.approx(73_700 * (1 - 0.563), rel=0.25)
    assert 8 * decode.decode == pytest.approx(14_800, rel=0.25)


def test_deepseek_needs_three_quarters_of_a_prefill_node_for_each_decode_node() -> None:
    # 608 B tokens read and 168 B written in a day.
    assert prefill_per_decode(608e9, 73_700, 168e9, 14_800) == pytest.approx(0.73, abs=0.005)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_deepseek_is_best_served_as_deepseek_serves_it(role: str) -> None:
    work = Workload(context=4989, concurrency=64, ttft=5.0, redundant=32)
    best = options(DEEPSEEK, H100, work, Network(), role)[0]
    assert best.split.expert
    assert best.split.data >= 4
    tensor = [item for item in options(DEEPSEEK, H100, work, Network(), role) if not item.split.expert]
    rates = [getattr(item, role) for item in tensor]
    assert max(rates) < getattr(best, role) / 2, "tensor parallelism copies the latent and reduces across nodes"


def test_a_step_of_one_gpu_is_the_roofline() -> None:
    small, work = SHAPES["llama-3-8b"], Workload(context=1000, concurrency=4)
    found = option(small, H100, Split(1), work, Network())
    assert found.prompt == pytest.approx(step_seconds(small, H100, prefill_work(small, 1000, 0)))
    whole = decode_work(small, 1000)
    assert found.token == pytest.approx(
        step_seconds(small, H100, replace(whole, flops=4 * whole.flops, kv_bytes=4 * whole.kv_bytes))
    )


def test_a_step_of_tensor_ranks_waits_for_their_reduces() -> None:
    work = Workload(context=8192, concurrency=1)
    found = option(LLAMA, H100, Split(8), work, Network())
    alone = step_seconds(LLAMA, H100, prefill_work(LLAMA, 8192, 0), 8)
    assert found.prompt == pytest.approx(alone + tensor_seconds(LLAMA, 8192, 8, Wire(450e9, 1e-6)))
    apart = option(LLAMA, H100, Split(16), work, Network(across=1e9))
    assert option(LLAMA, H100, Split(16), work, Network()).prefill > apart.prefill, "a slow network costs"


def test_stages_shorten_steps_but_not_the_way_of_a_token() -> None:
    work = Workload(context=8192, concurrency=2)
    one, two = (option(LLAMA, H200, Split(8, stages), work, Network()) for stages in (1, 2))
    assert two.prompt > one.prompt
    assert two.requests > one.requests


def test_goodput_of_prefill_leaves_the_wait_that_the_objective_allows() -> None:
    work = Workload(context=8192, ttft=2.0)
    found = option(LLAMA, H100, Split(8), work, Network())
    rate = found.prefill * 8 / 8192
    assert found.prompt + mean_wait(1, rate, found.prompt, services=0.0) == pytest.approx(2.0)


def test_goodput_of_decode_is_the_largest_batch_that_keeps_the_objective() -> None:
    work = Workload(context=2048, itl=0.02)
    found = option(LLAMA, H200, Split(8), work, Network())
    assert 0 < found.requests < found.memory.requests, "the objective binds, not memory"
    assert found.decode >= found.requests / 0.02 / 8
    more = option(LLAMA, H200, Split(8), replace(work, concurrency=found.requests + 1), Network())
    assert more.token > 0.02
    same = option(LLAMA, H200, Split(8), replace(work, concurrency=found.requests), Network())
    assert same.token <= 0.02


def test_an_objective_that_cannot_be_met_yields_nothing() -> None:
    strict = option(LLAMA, H100, Split(8), Workload(itl=0.001, ttft=0.01), Network())
    assert (strict.prefill, strict.decode, strict.requests) == (0.0, 0.0, 0)
    assert any("more than the objective of 1 ms" in text for text in strict.warnings)


def test_what_is_legal_but_poor_is_warned_about() -> None:
    wide = option(LLAMA, H200, Split(16), Workload(), Network())
    assert wide.warnings == (
        "8 KV heads on 16 GPUs: the KV cache is kept more than once",
        "every layer talks across nodes; keep it inside one NVLink domain",
    )
    assert option(LLAMA, H200, Split(8), Workload(), Network()).warnings == ()
    latent = option(DEEPSEEK, H200, Split(8), Workload(itl=1.0), Network())
    assert latent.warnings == ("the latent KV is kept on each of 8 GPUs: data parallelism would keep it once",)
    few = option(QWEN, H200, Split(1, 1, 4, expert=True), Workload(itl=1.0), Network())
    assert few.warnings == ("experts are spread over 4 of 8 GPUs of a node: more would hold fewer each",)
    cut = option(QWEN, H200, Split(1, 1, 8), Workload(itl=1.0), Network())
    assert cut.warnings == (
        "experts are cut into parts: each layer gathers all ranks' tokens; spread whole experts instead",
    )


@pytest.mark.parametrize(
    ("model", "split", "redundant", "words"),
    [
        (SHAPES["smollm2-135m"], Split(2), 0, "9 attention heads cannot be shared by 2 GPUs"),
        (replace(LLAMA, kv_heads=12, heads=96), Split(8), 0, "12 KV heads can be neither shared by nor copied onto 8"),
        (LLAMA, Split(1, 128), 0, "80 layers are fewer than 128 stages"),
        (LLAMA, Split(1, 1, 2), 0, "it has no experts: take more replicas"),
        (LLAMA, Split(2, 1, 1, True), 0, "it has no experts"),
        (MIXTRAL, Split(1, 1, 16, True), 0, "8 experts are fewer than 16 GPUs"),
        (MIXTRAL, Split(1, 1, 4, True), 1, "9 experts with copies cannot be spread evenly over 4 GPUs"),
    ],
)
def test_what_an_engine_refuses_is_told(model: ModelShape, split: Split, redundant: int, words: str) -> None:
    (found,) = problems(model, split, Workload(redundant=redundant))
    assert words in found
    assert not option(model, H200, split, Workload(redundant=redundant), Network()).feasible


def test_what_an_engine_takes_has_no_problems() -> None:
    fine = [(LLAMA, Split(16, 2)), (MIXTRAL, Split(2, 1, 4, True)), (MIXTRAL, Split(4)), (DEEPSEEK, Split(16))]
    assert [list(problems(model, split, Workload())) for model, split in fine] == [[]] * 4


def test_splits_are_ranked_by_goodput() -> None:
    for role in ("prefill", "decode"):
        found = options(LLAMA, H100, Workload(), Network(), role)
        rates = [getattr(item, role) for item in found]
        assert rates == sorted(rates, reverse=True)
        assert all(item.feasible for item in found)
        assert all(item.split.gpus >= 4 and item.split.data == 1 for item in found)
    assert options(SHAPES["llama-3-8b"], H100, Workload(), Network(), most=1)[0].split == Split(1)
    mixed = {item.split for item in options(MIXTRAL, H200, Workload(), Network())}
    assert {Split(2), Split(2, 1, 2, True), Split(1, 1, 8, True)} <= mixed


@given(
    context=st.integers(256, 16384),
    inside=st.floats(1e10, 1e12),
    across=st.floats(1e9, 1e11),
    split=st.sampled_from([Split(8), Split(4, 2), Split(16), Split(4, 1, 4, True), Split(1, 1, 32, True)]),
)
def test_faster_links_never_serve_less(context: int, inside: float, across: float, split: Split) -> None:
    work, slow = Workload(context=context), Network(8, inside, across)
    fast = Network(8, 2 * inside, 2 * across)
    before, after = (option(DEEPSEEK, H200, split, work, network) for network in (slow, fast))
    assert after.prefill >= before.prefill
    assert after.requests >= before.requests
    assert after.token <= before.token
