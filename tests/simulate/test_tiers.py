"""Slower memory behind simulated caches, and drafts in simulated decode groups."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from twinpool.core.drafts import DRAFTERS, expected_tokens, step_seconds
from twinpool.core.economics import ASSUMED, prices_of
from twinpool.core.kv import SHAPES
from twinpool.core.kv_cache import KvTier
from twinpool.core.tiers import Run, TierPrice
from twinpool.core.timing import ACCELERATORS
from twinpool.simulate.cache import Cache
from twinpool.simulate.drafting import drafting_of
from twinpool.simulate.pool import Setup, simulate
from twinpool.simulate.scores import score
from twinpool.simulate.tiers import Tier, runs, setup_of, tiers_for
from twinpool.simulate.traces import BLOCK_TOKENS, Request

PRICES = prices_of(SHAPES["llama-3-8b"], ACCELERATORS["h100"])
#: KV of Llama-3-8B in bytes a token.
TOKEN = 131_072.0
CHEAP = TierPrice(0.001, 1e-6)


def conversations(count: int, families: int = 60) -> list[Request]:
    """Return prompts that continue what came long before: more than accelerators hold."""
    dice, moment, turns = Random(1), 0.0, [4] * families
    found = []
    for number in range(count):
        moment += dice.expovariate(6.0)
        family = number % families
        turns[family] = min(40, turns[family] + 2)
        names = tuple(family * 1000 + place for place in range(turns[family]))
        found.append(Request(moment, len(names) * BLOCK_TOKENS + 100, 30, names))
    return found


def test_a_tier_of_the_manifest_has_its_tokens_and_its_way_over_the_host() -> None:
    host = setup_of(KvTier(kind="host", size="13107200k"), 13_107_200_000, TOKEN)
    disk = setup_of(KvTier(kind="disk", size="13107200k"), 13_107_200_000, TOKEN)
    assert host.tokens == disk.tokens == 100_000
    assert host.price.token == pytest.approx(TOKEN / 32e9)
    assert disk.price.token == pytest.approx(TOKEN / 32e9 + TOKEN / 4e9)
    assert disk.price.setup > host.price.setup


def test_each_tier_gives_what_those_before_it_lack() -> None:
    first, second = (Tier(Cache(100), CHEAP) for _ in range(2))
    first.cache.use([1, 2, 3])
    second.cache.use([1, 2, 3, 4, 5, 7])
    assert runs((first, second), [1, 2, 3, 4, 5, 6, 7], 1) == [
        Run(2 * BLOCK_TOKENS, CHEAP),
        Run(2 * BLOCK_TOKENS, CHEAP),
    ]
    assert runs((first, second), [1, 2, 3], 3) == []
    assert runs((), [1], 0) == []


def test_a_shared_tier_is_one_for_all_groups_and_no_workers() -> None:
    heard: list[str] = []
    setups = [setup_of(KvTier(kind=kind, size="1Gi"), 2**30, TOKEN) for kind in ("host", "shared")]
    shared: dict[str, Cache] = {}
    one, two = (tiers_for(setups, shared, lambda medium: heard.append(medium)) for _ in range(2))  # type: ignore[func-returns-value]
    assert heard == ["CPU", "CPU"]
    assert one[1].cache is two[1].cache
    assert one[0].cache is not two[0].cache


@pytest.mark.parametrize("kind", ["host", "shared"])
def test_what_a_tier_holds_is_loaded_and_saves_prefill(kind: str) -> None:
    trace = conversations(400)
    bare = Setup(PRICES, 2, 2, 100_000, 400_000, ttft=1.0)
    # At the assumed bandwidth of a file server, a model of this size is computed faster than it is loaded.
    found = setup_of(KvTier(kind=kind, size="400Gi"), 400 * 2**30, TOKEN)  # type: ignore[arg-type]
    tier = replace(found, price=CHEAP)
    tiered = replace(bare, tiers=(tier,), prices=replace(PRICES, load_token=tier.price.token))
    without, with_it = (score(simulate(trace, setup), 1.0, 0.05) for setup in (bare, tiered))
    assert with_it.hit > without.hit + 0.3
    assert with_it.ttft_mean < 0.7 * without.ttft_mean


def test_a_tier_that_is_slower_than_computing_is_left_alone() -> None:
    trace = conversations(120)
    bare = Setup(PRICES, 2, 2, 100_000, 400_000)
    slow = replace(setup_of(KvTier(kind="host", size="400Gi"), 400 * 2**30, TOKEN), price=TierPrice(1.0, 1.0))
    tiered = replace(bare, tiers=(slow,), prices=replace(PRICES, load_token=1.0))
    assert [job.first for job in simulate(trace, bare)] == [job.first for job in simulate(trace, tiered)]


def test_a_fixed_number_of_drafts_is_drafted_at_every_batch() -> None:
    drafting = drafting_of("ngram", 3, ASSUMED)
    assert {drafting.drafted(batch) for batch in (1, 7, 500, 5000)} == {3}
    seconds = step_seconds(ASSUMED, DRAFTERS["ngram"], 4, 3, 100.0)
    assert drafting.token(ASSUMED, 4, 400.0) == pytest.approx(seconds / expected_tokens(0.5, 3))
    assert drafting.token(ASSUMED, 0, 0.0) == 0.0


def test_auto_drafts_fewer_in_larger_batches_and_never_slows_a_group_down() -> None:
    drafting = drafting_of("eagle3", "auto", PRICES)
    counts = [drafting.drafted(batch) for batch in (1, 8, 64, 256, 1024, 4096)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 0
    for batch in (1, 8, 64, 256, 1024):
        assert drafting.token(PRICES, batch, batch * 512.0) <= PRICES.step(batch, batch * 512.0) * 1.0001


def test_drafts_write_a_single_stream_faster() -> None:
    trace = [Request(3.0 * number, 500, 300) for number in range(10)]
    bare = Setup(PRICES, 1, 1, 100_000, 400_000)
    drafted = replace(bare, drafting=drafting_of("eagle3", "auto", PRICES))
    ends = [[job.finish - job.first for job in simulate(trace, setup)] for setup in (bare, drafted)]
    assert max(ends[1]) < 0.8 * min(ends[0])
