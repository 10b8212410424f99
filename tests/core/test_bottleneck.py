"""Planted bottlenecks, each named; and no finding where there is too little to find it in."""

from dataclasses import replace

import pytest

from twinpool.core import bottleneck
from twinpool.core.bottleneck import MIN_REQUESTS, STAGES, Observation, Worker, find
from twinpool.core.tier_use import TierUse

PREFILL = tuple(Worker(f"p{n}", "prefill", in_flight=4) for n in range(2))
DECODE = tuple(Worker(f"d{n}", "decode", in_flight=12, seconds_per_token=0.02, kv_used=0.5) for n in range(3))
#: A pool in which every stage takes 50 ms a request, and all is even.
EVEN = Observation(
    window=30,
    requests=1000,
    stages=dict.fromkeys(STAGES, 50.0),
    ttft_p99=0.5,
    itl_p99=0.03,
    ttft_objective=0.8,
    itl_objective=0.04,
    workers=(*PREFILL, *DECODE),
    wanted={"prefill": 2, "decode": 3},
    routable={"prefill": 2, "decode": 3},
    gpus={"prefill": 4, "decode": 8},
    hit_share=0.4,
    hit_share_ever=0.4,
    pulled_bytes=1e11,
    pull_seconds=50.0,
)


def stage(name, seconds=900.0, **changes):
    return replace(EVEN, stages={**EVEN.stages, name: seconds}, ttft_p99=2.0, **changes)


def instead(worker, **changes):
    return tuple(replace(each, **changes) if each.name == worker else each for each in EVEN.workers)


PLANTED = {
    "queue": stage("router queue"),
    "prefill compute": stage("prefill"),
    "transfer link": stage("pull", pull_seconds=900.0),
    "decode bandwidth": replace(EVEN, itl_p99=0.09),
    "hot worker": replace(EVEN, ttft_p99=2.0, workers=instead("d1", seconds_per_token=0.05, in_flight=40)),
    "cache thrash": stage("prefill", hit_share=0.05, workers=instead("p0", kv_used=0.97)),
    "losing tier": stage("prefill queue", tiers=(TierUse("disk", 1e6, 400.0),), compute_seconds=5e-5),
    "expert skew": replace(EVEN, itl_p99=0.09, expert_balance=0.3),
    "cold start": stage("router queue", routable={"prefill": 2, "decode": 1}),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_the_planted_bottleneck_is_named(planted):
    found = find(PLANTED[planted])
    assert found.cause == planted
    for part in (found.stage, found.resource, found.technique, found.cost, *found.evidence, *found.caution):
        assert part
    assert found.within_objectives is False


def test_evidence_holds_the_numbers():
    assert any("90" in line for line in find(PLANTED["decode bandwidth"]).evidence)
    assert "d1 takes 50.0 ms a token, the others 20.0 ms" in find(PLANTED["hot worker"]).evidence
    assert find(PLANTED["prefill compute"]).share == pytest.approx(900 / 1100)
    assert any("0.11 GB/s" in line for line in find(PLANTED["transfer link"]).evidence)
    assert "2 of 3 decode groups do not serve yet" in find(PLANTED["cold start"]).evidence


@pytest.mark.parametrize(
    "little",
    [
        replace(EVEN, requests=MIN_REQUESTS - 1),
        replace(EVEN, window=1.0),
        replace(EVEN, stages={}),
        Observation(0.0, 0.0),
    ],
)
def test_too_little_gives_no_finding(little):
    found = find(little)
    assert found.cause == "not enough data"
    assert "fast" in found.caution[0]


def test_a_pool_that_keeps_its_objectives_is_told_so():
    assert find(EVEN).within_objectives is True
    assert find(replace(EVEN, ttft_objective=None, itl_objective=None)).within_objectives is None


def test_groups_that_start_are_not_blamed_while_nobody_waits():
    starting = {"prefill": 2, "decode": 2}
    assert find(stage("prefill", routable=starting)).cause == "prefill compute"


def test_a_queue_says_which_role_is_short():
    assert "decode" in find(PLANTED["queue"]).resource
    busy = tuple(replace(worker, waiting=50) for worker in PREFILL)
    assert "prefill" in find(stage("router queue", workers=(*busy, *DECODE))).resource
    assert find(stage("prefill queue")).cost == "4 GPUs"
    assert find(stage("decode start")).cost == "8 GPUs"
    assert find(stage("decode start", gpus={})).cost == "pods without GPUs"
    assert find(stage("router queue", workers=())).resource == "places at the decode workers"


def test_without_prefill_decode_reads_the_prompts():
    alone = stage("prefill", wanted={"decode": 3}, routable={"decode": 3}, workers=DECODE)
    assert find(alone).resource == "compute of the decode GPUs"


def test_a_full_cache_alone_is_no_thrash_and_preemptions_are():
    full = instead("d0", kv_used=0.97)
    assert find(stage("prefill", workers=full)).cause == "prefill compute"
    preempting = instead("d0", kv_used=0.97, preemptions=200.0)
    found = find(stage("prefill", workers=preempting))
    assert found.cause == "cache thrash"
    assert "0.20 preemptions" in found.evidence[1]


def test_a_worker_that_is_crowded_but_not_slow_stands_out_too():
    assert find(replace(EVEN, workers=instead("d1", in_flight=40))).cause == "hot worker"
    few = tuple(replace(worker, in_flight=0, seconds_per_token=None) for worker in EVEN.workers)
    assert find(replace(stage("prefill"), workers=few)).cause == "prefill compute"


def test_skewed_experts_do_not_explain_a_late_first_token():
    assert find(stage("prefill", expert_balance=0.3)).cause == "prefill compute"
    assert find(replace(EVEN, itl_p99=0.09, expert_balance=0.9)).cause == "decode bandwidth"


def test_a_tier_is_blamed_only_for_what_it_loses():
    lost = find(PLANTED["losing tier"])
    assert lost.technique.startswith("remove the disk tier from `prefill.kvCache.tiers`")
    assert lost.share == pytest.approx(350 / 1100)
    for tiers, compute in (
        ((TierUse("disk", 1e6, 50.0),), 5e-5),  # as fast as computing
        ((TierUse("disk", 1e4, 4.0),), 5e-5),  # slow, and hardly used
        ((TierUse("host", 0.0, 0.0),), 5e-5),  # never used
        ((TierUse("disk", 1e6, 400.0),), None),  # nothing to compare with
    ):
        assert find(stage("prefill queue", tiers=tiers, compute_seconds=compute)).cause == "queue"


def test_simulated_engines_prove_nothing_about_hardware():
    for seen in PLANTED.values():
        assert any("simulated" in line for line in find(replace(seen, simulated=True)).caution)
        assert not any("simulated" in line for line in find(seen).caution)


def test_a_pull_without_time_has_no_speed():
    assert any("0.00 GB/s" in line for line in find(stage("pull", pull_seconds=0.0)).evidence)


def test_rules_end_with_one_that_always_finds_something():
    assert bottleneck._RULES[-1](EVEN) is not None
