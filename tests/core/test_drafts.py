"""How many tokens to draft: published arithmetic, fewer in larger batches, none where it does not pay."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core import drafts
from twinpool.core.accelerators import ACCELERATORS
from twinpool.core.drafts import DRAFTERS, MARGIN, MAX_BATCH, Drafter
from twinpool.core.economics import ASSUMED, Prices, prices_of
from twinpool.core.kv import SHAPES

drafters = st.builds(
    Drafter,
    acceptance=st.floats(0, 1),
    share=st.floats(0, 0.5),
    most=st.integers(1, 8),
    own_kv=st.booleans(),
    source=st.just(""),
)
prices = st.builds(
    lambda shape, gpu, count: prices_of(SHAPES[shape], ACCELERATORS[gpu], count),
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from(sorted(ACCELERATORS)),
    st.integers(1, 16),
)


@pytest.mark.parametrize(("acceptance", "drafted", "tokens"), [(0.8, 5, 3.69), (0.5, 1, 1.5), (1.0, 3, 4), (0.0, 3, 1)])
def test_tokens_of_a_step_are_those_of_the_closed_form(acceptance: float, drafted: int, tokens: float) -> None:
    assert drafts.expected_tokens(acceptance, drafted) == pytest.approx(tokens, abs=0.005)
    if acceptance < 1:
        closed = (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
        assert drafts.expected_tokens(acceptance, drafted) == pytest.approx(closed)


@given(prices=prices, batch=st.integers(1, 500), context=st.integers(0, 10**6), drafted=st.integers(0, 8))
def test_checking_no_draft_is_a_plain_step_and_each_draft_costs_more(
    prices: Prices, batch: int, context: int, drafted: int
) -> None:
    assert prices.verify(batch, 0, context) == pytest.approx(prices.step(batch, context))
    assert prices.verify(batch, drafted, context) <= prices.verify(batch, drafted + 1, context)
    assert prices.verify(0, drafted, context) == 0


@given(prices=prices, drafter=drafters, batch=st.integers(1, MAX_BATCH))
def test_what_is_chosen_is_no_worse_than_any_other_number(prices: Prices, drafter: Drafter, batch: int) -> None:
    count = drafts.best(prices, drafter, batch, drafter.most)
    gains = [drafts.speedup(prices, drafter, batch, other) for other in range(drafter.most + 1)]
    assert gains[0] == pytest.approx(1)
    assert gains[count] >= max(gains) or (count == 0 and max(gains) < MARGIN)


@pytest.mark.parametrize("method", sorted(DRAFTERS))
@pytest.mark.parametrize(("shape", "gpu"), [("llama-3-8b", "h100"), ("llama-3-70b", "h100"), ("smollm2-135m", "cpu")])
def test_a_schedule_covers_every_batch_and_never_grows(method: str, shape: str, gpu: str) -> None:
    entries = drafts.schedule(prices_of(SHAPES[shape], ACCELERATORS[gpu]), DRAFTERS[method])  # type: ignore[index]
    assert (entries[0][0], entries[-1][1]) == (1, MAX_BATCH)
    for before, after in itertools.pairwise(entries):
        assert after[0] == before[1] + 1
        assert after[2] < before[2]


def test_drafting_is_off_where_a_step_computes_and_on_where_it_waits_for_memory() -> None:
    entries = drafts.schedule(ASSUMED, DRAFTERS["ngram"])
    assert entries[0][2] == DRAFTERS["ngram"].most
    assert entries[-1][2] == 0
    assert 200 < entries[-1][0] < MAX_BATCH, "about where an H100's arithmetic becomes the bottleneck (295 tokens)"


def test_drafts_that_are_never_kept_are_not_made() -> None:
    useless = Drafter(0.0, 0.1, 4, own_kv=False, source="")
    assert drafts.schedule(ASSUMED, useless) == ((1, MAX_BATCH, 0),)
    assert drafts.best(ASSUMED, useless, 1, 0) == 0
