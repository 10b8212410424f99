"""The ratio benchmark: each workload wants the ratio that it was made for, and both samples of a run are of one run."""

from __future__ import annotations

import pytest

from bench.ratio.benchmark import PAIRS, PRICES, PROMISE, ROOM, Place, foretold
from bench.ratio.live import Count
from bench.ratio.workloads import KINDS, Kind, requests
from twinpool.operator.logic.scaling_need import Group, largest_batch
from twinpool.simulate.whatif import demand


@pytest.mark.parametrize(("kind", "pair"), list(zip(KINDS, ((3, 1), (2, 2), (1, 3)), strict=True)))
def test_the_work_of_both_stages_is_nearest_to_the_pair_that_wins(kind: Kind, pair: tuple[int, int]) -> None:
    work = demand(requests(kind, 2000, 1), PRICES, 0)
    batch = largest_batch(work, PRICES, PROMISE.itl, Group(ROOM, 4096))
    decode = work.output * PRICES.step(batch, batch * (work.prompt + work.output / 2)) / batch
    assert max(PAIRS, key=lambda one: min(one[0] / work.prefill, one[1] / decode)) == pair


def test_the_planners_pair_uses_all_gpus_and_follows_the_work() -> None:
    found = [foretold(demand(requests(kind, 500, 1), PRICES, 0)) for kind in KINDS]
    assert all(sum(pair) == 4 and rate > 0 for pair, rate in found)
    assert found[-1][0] == (1, 3)


def test_both_samples_of_a_run_are_of_the_same_requests_in_whatever_order_they_are_taken() -> None:
    place = Place(Kind("tiny", 800, 8, 60, ""), 60)
    first = place.planned(), place.best()
    second = place.best(), place.planned()
    assert len(place.chosen) == 2
    assert first[0] <= first[1]
    assert second[1] <= second[0]
    assert first[1] == max(place.found[pair, False][0] for pair in PAIRS)
    assert second[0] == max(place.found[pair, False][1] for pair in PAIRS)


def test_what_a_split_serves_is_what_its_busiest_engine_lets_through() -> None:
    count = Count(1, 40, [8.0, 1.0, 2.0, 1.0])
    assert count.served == 5.0
    assert count.each == (0.2, 0.1)
