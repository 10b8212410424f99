"""Levers of the scaling benchmark's pool: what they do to it, and that it is as it was without them."""

from __future__ import annotations

import pytest

from bench.scaling.levers import LEVERS, results
from bench.scaling.pool import Pool, Rule, _shift, run
from bench.scaling.workloads import BURSTS, Arrival, Moment, Workload

CALM = Workload("calm", lambda _: Moment(1.0))


class Fixed(Rule):
    """One group of prefill and of decode; ``lending`` and ``way`` as they are set."""

    lending, way = False, 0

    def decide(self, pool: Pool) -> tuple[int, int]:
        return pool.wanted

    def lends(self, pool: Pool) -> bool:
        return self.lending

    def shifts(self, pool: Pool) -> int:
        return self.way


def test_a_group_changes_its_role_when_it_has_ended_what_it_does() -> None:
    pool, rule = Pool(CALM, now=100.0, prefill=[0.0, 103.0], decode=[0.0]), Fixed()
    rule.way = 1
    _shift(pool, rule)
    assert (pool.prefill, pool.decode, pool.shifted) == ([103.0], [0.0, 102.0], 1), "the one that is free"
    rule.way = -1
    _shift(pool, rule)
    assert (pool.prefill, pool.decode, pool.shifted) == ([103.0, 110.0], [102.0], 0), "after its answers"


@pytest.mark.parametrize("lending", [False, True])
def test_prefill_groups_write_what_decode_groups_have_no_place_for(lending: bool) -> None:
    rule = Fixed()
    rule.lending = lending
    crowd = [Arrival(10.0 + number / 100, 50, 2000) for number in range(100)]
    attained = run(CALM, crowd, rule, (1, 1)).attained
    # A decode group has 64 places, and each answer takes 15 s.
    assert attained == pytest.approx(1.0 if lending else 0.64, abs=0.02)


def test_roles_that_change_meet_a_burst_that_changes_the_ratio() -> None:
    (burst,) = (one for one in BURSTS if one.name.startswith("longer answers and"))
    (fixed,), (changing,) = (results(burst, LEVERS[name], 1) for name in ("decode prefills", "and roles change"))
    assert changing.attained > fixed.attained + 0.02
