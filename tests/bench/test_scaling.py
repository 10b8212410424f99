"""The pool of the scaling benchmark: nobody is lost, overload is shared by the newest, and runs add up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from bench.scaling import cells
from bench.scaling.pool import Pool, run
from bench.scaling.rules import Static
from bench.scaling.workloads import Moment, Workload, arrivals

if TYPE_CHECKING:
    from pathlib import Path

STEADY = Workload("steady", lambda _: Moment(10.0))


class Watched(Static):
    """Keeps the pool that it saw last."""

    pool: Pool

    def decide(self, pool: Pool) -> tuple[int, int]:
        self.pool = pool
        return super().decide(pool)


@pytest.mark.parametrize("pair", [(8, 8), (1, 8), (8, 1), (1, 1)])
def test_every_request_is_answered_or_turned_away_and_gives_its_place_back(pair: tuple[int, int]) -> None:
    requests, rule = arrivals(STEADY, 1), Watched(pair)
    run(STEADY, requests, rule, pair)
    assert len(rule.pool.ended) + rule.pool.refused == len(requests)
    assert rule.pool.admitted == 0
    assert not rule.pool.queue
    assert rule.pool.context == pytest.approx(0.0, abs=1e-3)


def test_with_room_nearly_all_keep_their_objectives_and_in_overload_as_many_as_there_is_room_for() -> None:
    requests = arrivals(STEADY, 1)
    assert run(STEADY, requests, Static((8, 8)), (8, 8)).attained > 0.99
    # 10 requests/s of 0.103 s keep one prefill group a little more than busy; with 15 it can do two thirds.
    busy = replace(STEADY, at=lambda _: Moment(15.0))
    assert 0.4 < run(busy, arrivals(busy, 1), Static((1, 8)), (1, 8)).attained < 0.7


def test_groups_that_are_lost_come_again_after_a_start() -> None:
    lost = replace(STEADY, loss=600.0, start=300.0)
    requests = arrivals(lost, 1)
    both = [run(workload, requests, Static((2, 2)), (2, 2)).attained for workload in (STEADY, lost)]
    assert both[1] < both[0] - 0.02


def test_seeds_add_to_what_was_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cells.main(["--list"]) == 0
    name = capsys.readouterr().out.splitlines()[0]
    for seeds in (1, 2):
        assert cells.main(["--run", name, "--seeds", str(seeds), "--rules", "static", "--out", str(tmp_path)]) == 0
        (path,) = tmp_path.iterdir()
        assert [len(runs) for _, _, runs in json.loads(path.read_text())] == [seeds, seeds]
    arguments = ["--run", name, "--seeds", "1", "--rules", "none", "--again", "static mean", "--out", str(tmp_path)]
    assert cells.main(arguments) == 0
    assert [rule for rule, _, _ in json.loads(path.read_text())] == ["static peak"]
    assert cells.main(["--run", "no such cell"]) == 2
    assert cells.main(["--report", str(tmp_path / "nothing")]) == 2
    assert "see --list" in capsys.readouterr().err
