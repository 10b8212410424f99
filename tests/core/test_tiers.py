"""Load or compute: chosen chunk by chunk, never worse than either alone, and as published numbers say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.economics import ASSUMED, prices_of
from twinpool.core.kv import SHAPES, kv_bytes_per_token
from twinpool.core.tiers import CHUNK, Plan, Run, TierPrice, load_seconds, pays_from, plan
from twinpool.core.timing import ACCELERATORS, Accelerator

prices = st.builds(TierPrice, st.floats(0, 0.1), st.floats(0, 1e-3))
runs = st.lists(st.builds(Run, st.integers(1, 5000), prices), max_size=4)


@given(runs=runs, device=st.integers(0, 5000), rest=st.integers(1, 5000), chunk=st.sampled_from((16, CHUNK)))
def test_the_plan_is_the_best_point_of_all_and_beats_both_ends(runs, device, rest, chunk):
    held = sum(run.tokens for run in runs)
    prompt = device + held + rest
    got = plan(ASSUMED, prompt, device, runs, chunk)
    nothing = ASSUMED.prefill(prompt - device, device)
    everything = load_seconds(runs) + ASSUMED.prefill(rest, device + held)
    assert got.seconds <= nothing
    assert not runs or got.seconds <= everything + 1e-9
    assert 0 <= got.tokens <= held
    assert got.seconds == pytest.approx(
        got.load_seconds + ASSUMED.prefill(prompt - device - got.tokens, device + got.tokens)
    )


def test_nothing_held_or_nothing_left_to_compute_loads_nothing():
    nothing = ASSUMED.prefill(1000, 0)
    assert plan(ASSUMED, 1000, 0, []) == Plan(0, 0.0, nothing)
    assert plan(ASSUMED, 1000, 0, [Run(1000, TierPrice(0.0, 0.0))]).tokens == 768, "the last chunk has the last token"


def test_a_slow_tier_is_not_read_though_a_fast_one_before_it_is():
    fast, slow = TierPrice(0.0, 1e-6), TierPrice(0.0, 1e-3)
    assert plan(ASSUMED, 4096, 0, [Run(1024, fast), Run(2048, slow)]).tokens == 1024
    assert plan(ASSUMED, 4096, 0, [Run(1024, fast), Run(2048, fast)]).tokens == 3072
    assert plan(ASSUMED, 4096, 0, [Run(1024, slow), Run(2048, slow)]).tokens == 0


@pytest.mark.parametrize(("bandwidth", "pays"), [(5e9, False), (25e9, True)])
def test_the_bandwidth_from_which_loading_pays_is_as_mooncake_publishes(bandwidth, pays):
    # FAST'25, equation 2: 19 GB/s for 8192 tokens of LLaMA-3-70B on 8 x H800, at the peak FLOP/s.
    gpu = Accelerator("h800", flops=989e12, bandwidth=1e15, flops_share=1.0, bandwidth_share=1.0, overhead=0.0)
    model = SHAPES["llama-3-70b"]
    tier = TierPrice(0.0, kv_bytes_per_token(model) / bandwidth)
    assert (plan(prices_of(model, gpu, 8), 9000, 0, [Run(8192, tier)]).tokens > 0) is pays


def test_from_how_many_tokens_on_a_tier_pays():
    assert pays_from(ASSUMED, TierPrice(0.0, 0.0)) == CHUNK
    far = pays_from(ASSUMED, TierPrice(0.1, 5e-6))
    assert far is not None
    assert far > 2048
    assert pays_from(prices_of(SHAPES["llama-3-8b"], ACCELERATORS["h100"]), TierPrice(0.0, 1.0)) is None
