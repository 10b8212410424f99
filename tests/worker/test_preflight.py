"""What a preflight plans and concludes: pairs, bandwidths, who is missing, which link is to blame."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from twinpool.worker.logic import preflight, report
from twinpool.worker.logic.preflight import Collective, Link, Member, Result
from twinpool.worker.logic.supervisor import State

FOUND = Result(
    outcome="passed",
    backend="gloo",
    world=2,
    seconds=0.5,
    collectives=(Collective("all-reduce", 1024, 0.001, 1e6),),
    links=(Link("a", "b", 1e-4, 2e9),),
)


@given(st.integers(1, 24))
def test_every_pair_is_measured_once_and_nobody_is_in_two_pairs_at_once(world):
    plan = preflight.rounds(world)
    pairs = list(itertools.chain(*plan))
    assert sorted(pairs) == list(itertools.combinations(range(world), 2))
    for pairs in plan:
        ranks = list(itertools.chain(*pairs))
        assert len(ranks) == len(set(ranks))
    assert len(plan) <= world, "pairs go at once where they can"


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert preflight.bus_bandwidth("all-reduce", 4, 1000, 1.0) == 1500.0
    assert preflight.bus_bandwidth("all-to-all", 4, 1000, 0.5) == 1500.0


def test_the_three_ways_not_to_meet_are_told_apart():
    a, b = Member(0, 2, "pod-a"), Member(1, 2, "pod-b")
    assert preflight.roll_call([a, b], 2) == ("", ())
    assert preflight.roll_call([a], 2) == ("", (1,))
    wrong, _ = preflight.roll_call([a, Member(1, 4, "pod-b")], 2)
    missing = preflight.missing_peer((1,), [a], 30.0)
    blocked = preflight.blocked_port(1, "10.0.0.7", 29511, 30.0, "Connection timed out")
    assert wrong.startswith("wrong world size: rank 1, pod pod-b, expects 4 ranks and others expect 2")
    assert missing.startswith("missing peer: rank 1 did not come within 30 s (came: pod-a)")
    assert blocked.startswith("blocked port: rank 1 cannot reach port 29511 of rank 0 at 10.0.0.7")
    assert "(came: nobody)" in preflight.missing_peer((0, 1), [], 30.0)
    assert preflight.roll_call([a, Member(0, 2, "pod-c")], 2)[0] == "two pods are rank 0: pod-a and pod-c"


def links(*bandwidths):
    return [Link(f"p{number}", "q", 1e-4, bandwidth) for number, bandwidth in enumerate(bandwidths)]


def test_a_link_far_below_the_others_is_named():
    assert preflight.slow_links(links(1e9, 1e7)) == (), "two links do not say which one is right"
    assert preflight.slow_links(links(1e9, 1.1e9, 0.6e9)) == ()
    (one,) = preflight.slow_links(links(1e9, 1e9, 1e8))
    assert one == "the link p2 - q carries 100 MB/s, the median link 1000 MB/s"


@given(st.floats(1e6, 1e12), st.integers(3, 40), st.floats(0.001, 0.45), st.data())
def test_one_slowed_link_is_always_found_and_no_other(bandwidth, count, share, data):
    found = links(*[bandwidth] * count)
    slowed = data.draw(st.integers(0, count - 1))
    found[slowed] = dataclasses.replace(found[slowed], bandwidth=bandwidth * share)
    (said,) = preflight.slow_links(found)
    assert found[slowed].name in said


def test_results_are_read_back_whole_or_not_at_all():
    assert Result.from_json(FOUND.to_json()) == FOUND
    assert json.loads(FOUND.to_json())["slowest"] == "a - b"
    assert json.loads(Result("skipped").to_json())["slowest"] == ""
    for text in (FOUND.to_json()[:-3], FOUND.to_json().replace("passed", "great"), "[]", "{}", b""):
        assert Result.from_json(text) is None
    member = Member(1, 2, "p")
    assert Member.from_json(json.dumps(dataclasses.asdict(member))) == member


@pytest.mark.parametrize("found", [FOUND, Result("failed", "missing peer")])
def test_the_result_is_served_and_counted(found):
    shown = report.Snapshot(State(), "vllm", "m", "decode", "0.1.0", preflight=found)
    assert report.preflight(shown) == (200, found.to_json())
    families = {family.name: family.samples for family in text_string_to_metric_families(report.metrics(shown))}
    outcomes = {s.labels["outcome"]: s.value for s in families["twinpool_worker_preflight_outcome"]}
    assert [outcome for outcome, value in outcomes.items() if value] == [found.outcome]
    slowest = families.get("twinpool_worker_preflight_slowest_link_bytes_per_second", [])
    assert [sample.value for sample in slowest] == [link.bandwidth for link in found.links]
    bandwidths = families["twinpool_worker_preflight_bus_bandwidth_bytes_per_second"]
    assert [sample.labels for sample in bandwidths] == [
        {"collective": each.kind, "bytes": str(each.bytes)} for each in found.collectives
    ]
    assert report.preflight(report.Snapshot(State(), "vllm", "m", "decode", "0.1.0"))[0] == 404
