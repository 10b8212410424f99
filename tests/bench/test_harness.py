"""Figures, bars, the order of runs, CPU accounting and exit codes."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import __main__ as command
from bench.harness import registry, report, runner
from bench.harness.cell import Bar, Cell, Pair
from bench.harness.cpu import ProcessTimes, cpu_seconds, parse_stat, tree_ticks
from bench.harness.figures import figures
from bench.harness.server import ServerFailed, free_port, started
from twinpool.core.errors import TwinpoolError
from twinpool.localcluster.waiting import wait_until


def cell(**fields):
    return Cell(**{"what": "w", "unit": "s", "ours": lambda: 1.0, "beside": lambda: 2.0, **fields})


def test_the_ratio_is_the_median_of_paired_ratios():
    row = figures(cell(), [Pair(1, 2), Pair(10, 10), Pair(3, 1)])
    assert (row.ours, row.beside, row.ratio, row.spread) == (3, 2, 1, (0.5, 3))


def test_without_beside_the_spread_is_of_ours():
    row = figures(cell(beside=None, bar=Bar("ours", at_least=2)), [Pair(1), Pair(4), Pair(2)])
    assert (row.ours, row.beside, row.ratio, row.spread, row.missed) == (2, None, None, (1, 4), False)


@pytest.mark.parametrize(
    ("bar", "missed"),
    [
        (None, False),
        (Bar("ratio", at_most=0.5), False),
        (Bar("ratio", at_most=0.4), True),
        (Bar("ratio", at_least=0.6), True),
        (Bar("ours", at_most=1, at_least=1), False),
    ],
)
def test_a_bar_is_cleared_at_its_limit(bar, missed):
    assert figures(cell(bar=bar), [Pair(1, 2)]).missed is missed


def test_a_ratio_that_could_not_be_taken_is_missed():
    assert figures(cell(bar=Bar("ratio", at_most=1)), [Pair(1, 0)]).missed


def test_a_row_needs_a_run_and_a_ratio_needs_two_sides():
    with pytest.raises(ValueError, match="no run"):
        figures(cell(), [])
    with pytest.raises(ValueError, match="nothing beside"):
        cell(beside=None, bar=Bar("ratio", at_most=1))


def test_runs_are_interleaved_and_their_order_alternates():
    order = []
    both = [
        cell(
            what=name, ours=lambda n=name: order.append(n + "o") or 1, beside=lambda n=name: order.append(n + "b") or 1
        )
        for name in "xy"
    ]
    rows = runner.measure(both, runs=2, budget=100, on_run=lambda *_: None, clock=lambda: 0.0)
    assert order == ["xo", "xb", "yo", "yb", "xb", "xo", "yb", "yo"]
    assert [len(row.pairs) for row in rows] == [2, 2]


def test_a_round_that_does_not_fit_the_budget_is_not_started():
    now = iter(range(0, 1000, 10))
    rows = runner.measure([cell(beside=None)], runs=9, budget=45, on_run=lambda *_: None, clock=lambda: next(now))
    assert len(rows[0].pairs) == 2


def test_cpu_is_counted_over_the_whole_tree():
    line = "7 (a b) c) S 3 7 7 0 -1 4194304 1 2 3 4 10 20 30 40 20 0 1 0 100"
    assert parse_stat(line) == ProcessTimes(7, 3, 100)
    tree = [ProcessTimes(1, 0, 5), ProcessTimes(2, 1, 7), ProcessTimes(3, 2, 11), ProcessTimes(4, 0, 99)]
    assert tree_ticks(tree, 1) == 23
    assert cpu_seconds(os.getpid()) > 0


def test_a_server_that_ends_early_says_why():
    argv = [sys.executable, "-c", "raise SystemExit('no model')"]
    with pytest.raises(ServerFailed, match="no model"), started(argv, host="127.0.0.1", port=free_port()):
        pass


def test_a_server_ends_with_a_benchmark_that_is_killed():
    port = free_port()
    script = f"""
import sys, time
from bench.harness.server import started
argv = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
with started(argv, host="127.0.0.1", port={port}) as pid:
    print(pid, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        server = int(benchmark.stdout.readline())
        assert _runs(server)
        benchmark.kill()
    wait_until(lambda: not _runs(server), 10, "the server ends")


def _runs(pid):
    """Return whether a process does anything: one that nobody waits for stays as a zombie."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize(("value", "shown"), [(None, "-"), (0.012345, "0.0123"), (1234.5, "1234")])
def test_numbers_have_three_digits(value, shown):
    assert report.number(value) == shown


def test_an_unknown_benchmark_is_named_with_those_that_exist(capsys):
    assert command.main(["nonsense"]) == 2
    assert "worker" in capsys.readouterr().err
    with pytest.raises(registry.UnknownBenchmark):
        registry.load("nonsense")


@pytest.mark.parametrize(("limit", "code"), [(0.5, 0), (0.4, 1)])
def test_the_exit_code_says_whether_a_bar_was_missed(monkeypatch, tmp_path, capsys, limit, code):
    class Module:
        TITLE = "title"

        @staticmethod
        @contextlib.contextmanager
        def cells(_quick):
            yield [cell(bar=Bar("ratio", at_most=limit), note="a note")]

    monkeypatch.setattr(registry, "load", lambda _name: Module)
    out = tmp_path / "figures.json"
    assert command.main(["x", "--quick", "--out", str(out)]) == code
    written = json.loads(out.read_text())
    assert written["missed"] == (["w"] if code else [])
    assert written["cells"][0]["samples"] == [{"ours": 1.0, "beside": 2.0}] * 3
    shown = capsys.readouterr()
    assert "a note" in shown.out
    assert "run 1 of 3" in shown.err


def test_what_cannot_be_written_or_started_is_explained(monkeypatch, tmp_path, capsys):
    with pytest.raises(TwinpoolError, match="cannot write"):
        command._write(tmp_path / "no" / "file", "")

    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "load", interrupted)
    assert command.main(["x"]) == 2
    assert "interrupted" in capsys.readouterr().err
