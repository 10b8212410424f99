"""``twinpool simulate``: traces in, a table or JSON out, and what is wrong with them by line."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.cli.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., int]

LOGGED = [{"time": 0.4 * n, "prompt_tokens": 500 + 40 * n, "events": 21} for n in range(60)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def simulate(*arguments: str, lines: str | None = None, **spec: Any) -> int:
        trace, pool = tmp_path / "trace.jsonl", tmp_path / "pool.yaml"
        trace.write_text(lines if lines is not None else "\n".join(json.dumps(entry) for entry in LOGGED))
        body = {
            "model": {"name": "m"}, "prefill": {"replicas": 1}, "decode": {"replicas": 1},
            "objectives": {"ttft": "2s", "itl": "50ms"}, **spec,
        }  # fmt: skip
        manifest = {
            "apiVersion": "serving.twinpool.dev/v1alpha1", "kind": "InferencePool", "metadata": {"name": "llama"},
            "spec": {key: value for key, value in body.items() if value is not None},
        }  # fmt: skip
        pool.write_text(yaml.safe_dump(manifest))
        source = () if "--trace" in arguments else ("--trace", str(trace))
        return main(["simulate", *source, "--pool", str(pool), *arguments])

    return simulate


def test_a_trace_gives_a_row_for_each_rule_and_rate_and_the_planners_numbers(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--compare", "random, price", "--sweep", "rate=0.5..1.5") == 0
    out = capsys.readouterr().out
    assert "60 requests in virtual time" in out
    assert len([line for line in out.splitlines() if "100.0%" in line]) >= 15
    assert "planner: 1:1, since" in out


def test_programs_get_the_same_and_the_same_twice(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-o", "json", "--first", "40") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["requests"], told["skipped"], told["planned"]["prefill"]) == (40, [], 1)
    (only,) = told["runs"]
    assert (only["rule"], only["rate"], only["attainment"]) == ("least-load", 1.0, 1.0)
    assert run("-o", "json", "--first", "40") == 0
    assert json.loads(capsys.readouterr().out) == told


def test_a_pool_that_is_too_small_is_an_answer_of_no_and_the_planner_says_how_many(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    heavy = "\n".join(json.dumps({**entry, "prompt_tokens": 30_000}) for entry in LOGGED)
    assert run("-o", "json", lines=heavy, objectives={"ttft": "10s", "itl": "50ms"}) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["planned"]["prefill"] > 1
    ours, planned = told["runs"]
    assert planned["prefill"] == told["planned"]["prefill"]
    assert planned["attainment"] > ours["attainment"]
    bounds = {"prefill": {"max": 2}, "decode": {"max": 2}}
    assert run("-o", "json", lines=heavy, scaling=bounds, objectives={"ttft": "10s", "itl": "50ms"}) == 1
    assert json.loads(capsys.readouterr().out)["planned"]["prefill"] == 2


def test_numbers_of_groups_are_compared_at_the_rates_that_each_can_serve(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--pairs", "1:3, 3:1,1:1", "--capacity")
    assert run(*asked, "-o", "json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["prefill"], one["decode"]) for one in runs] == [(1, 1), (1, 3), (3, 1)]
    served = [one["capacity"] for one in runs]
    assert served[2] > 1.5 * served[0] > 1.2 * 60 / 24
    assert run(*asked, "--sweep", "rate=0.5..1.5") == 0
    out = capsys.readouterr().out
    assert "keeps them up to" in out
    assert out.count(f"{served[2]:.3g}/s") == 5


GROWING = [{"time": 2.0 * n, "prompt_tokens": 3000, "events": 21} for n in range(60)]
GROWING += [{"time": 120 + n / 12, "prompt_tokens": 3000, "events": 21} for n in range(2400)]


def test_a_pool_with_scaling_is_played_with_numbers_that_follow_the_work(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = "\n".join(json.dumps(entry) for entry in GROWING)
    scaling = {"prefill": {"max": 6}, "decode": {"max": 4}}
    file = tmp_path / "report.html"
    asked = ("--start", "20s", "--report", str(file))
    run(*asked, "-o", "json", lines=lines, scaling=scaling)
    follows, stays, *_ = json.loads(capsys.readouterr().out)["runs"]
    assert (follows["scaled"], stays["scaled"]) == (True, False)
    assert follows["attainment"] > stays["attainment"] + 0.3
    assert follows["groups"][0] == {"at": 0.0, "prefill": 1, "decode": 1}
    assert max(entry["prefill"] for entry in follows["groups"]) > 1
    assert follows["changes"][0]["reason"]
    assert stays["changes"] == []
    assert f"<td>1-{max(entry['prefill'] for entry in follows['groups'])}:" in file.read_text()
    run("-o", "json", "--capacity", "--first", "80", lines=lines, scaling=scaling)
    follows, stays, *_ = json.loads(capsys.readouterr().out)["runs"]
    assert (follows["capacity"], stays["capacity"] > 0) == (None, True)


def test_of_many_changes_the_first_are_written(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "\n".join(json.dumps(entry) for entry in GROWING)
    for shown in (20, 0):
        monkeypatch.setattr("twinpool.cli.simulate._CHANGES", shown)
        run("--start", "20s", lines=lines, scaling={"prefill": {"max": 6}, "decode": {"max": 4}})
        out = capsys.readouterr().out
        assert (" s: " in out) == bool(shown)
        assert ("changes not shown: " in out) == (not shown)


def test_groups_that_are_lost_cost_what_they_were_doing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-o", "json", prefill={"replicas": 2}) == 0
    (whole,) = json.loads(capsys.readouterr().out)["runs"][:1]
    assert run("-o", "json", "--lose", "10s:decode, 12s:prefill:2", "--start", "5s", prefill={"replicas": 2}) == 1
    (less,) = json.loads(capsys.readouterr().out)["runs"][:1]
    assert less["attainment"] < whole["attainment"]
    pairs = [(entry["prefill"], entry["decode"]) for entry in less["groups"]]
    assert pairs == [(2, 1), (2, 0), (0, 0), (0, 1), (1, 1), (2, 1)]


def test_tiers_and_drafts_of_the_manifest_are_played(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    def itl(**spec: Any) -> float:
        run("-o", "json", **spec)
        return float(json.loads(capsys.readouterr().out)["runs"][0]["itl_p99"])

    plain = itl()
    assert itl(speculation={"method": "ngram"}) < plain
    decode = {"replicas": 1, "speculation": {"tokens": 4}}
    assert itl(speculation={"method": "ngram"}, decode=decode) != plain
    tiers = [{"kind": "host", "size": "8Gi"}, {"kind": "shared", "size": "9Gi", "claim": "kv"}]
    assert itl(prefill={"replicas": 1, "kvCache": {"tiers": tiers}}) == plain, "prompts of a log have nothing in common"


def test_a_rollout_in_the_middle_is_played(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("-o", "json", "--roll", "8s", "--start", "3s") == 0
    (only,) = json.loads(capsys.readouterr().out)["runs"][:1]
    pairs = [(entry["prefill"], entry["decode"]) for entry in only["groups"]]
    assert pairs[0] == pairs[-1] == (1, 1)
    assert min(pairs) == (1, 1)
    assert len(pairs) > 2
    assert only["attainment"] == 1.0


def test_lines_that_cannot_be_read_are_named_and_left_out(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "\n".join([json.dumps(LOGGED[0]), "oops", *['{"time": 1}'] * 11, json.dumps(LOGGED[1])])
    assert run(lines=lines) == 0
    said = capsys.readouterr()
    assert "left out: line 2: JSONDecodeError" in said.err
    assert "left out: line 3: KeyError: 'events'" in said.err
    assert "left out: 2 more lines" in said.err
    assert "2 requests" in said.out


@pytest.mark.parametrize(
    ("arguments", "spec", "words"),
    [
        (["--gpu", "abacus"], {}, "the GPU 'abacus' is unknown"),
        (["--model", "gpt-9"], {}, "the model 'gpt-9' is unknown"),
        (["--model", "llama-3-70b"], {}, "does not fit on 1 h100"),
        (["--compare", "fastest"], {}, "the rule 'fastest' is unknown"),
        (["--sweep", "rate=2..1"], {}, "write rate=LOW..HIGH"),
        (["--sweep", "rate=fast"], {}, "write rate=LOW..HIGH"),
        (["--pairs", "1:3,0:2"], {}, "write PREFILL:DECODE"),
        (["--pairs", "3"], {}, "write PREFILL:DECODE"),
        (["--start", "fast"], {}, "write durations such as 90s"),
        (["--roll", "later"], {}, "write durations such as 90s"),
        (["--lose", "10m"], {}, "AT:ROLE[:COUNT]"),
        (["--lose", "10m:router"], {}, "AT:ROLE[:COUNT]"),
        (["--lose", "10m:decode:many"], {}, "AT:ROLE[:COUNT]"),
        (["--lose", "10m:decode:1:2"], {}, "AT:ROLE[:COUNT]"),
        (["--model-config", "/nonexistent/config.json"], {}, "cannot be read"),
        (["--trace", "/nonexistent/trace"], {}, "cannot be read"),
        ([], {"lines": ""}, "holds no request"),
        ([], {"lines": "{}"}, "holds no request: line 1: KeyError"),
        ([], {"prefill": None}, "has no prefill role"),
    ],
)
def test_what_cannot_be_simulated_is_said_with_what_to_do(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: list[str], spec: dict[str, Any], words: str
) -> None:
    assert run(*arguments, **spec) == 1
    assert words in capsys.readouterr().err.replace("\n", " ")


def test_progress_is_shown_to_people_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run() == 0
    assert "requests" in capsys.readouterr().out


def test_a_page_with_plots_is_written_beside_the_table(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "report.html"
    assert run("--report", str(file), "--first", "20") == 0
    assert "pool.yaml with trace.jsonl" in file.read_text()
    assert "20 requests in virtual time" in capsys.readouterr().out
    assert run("--report", str(tmp_path / "none" / "report.html"), "--first", "20") == 1
    assert "cannot be written" in capsys.readouterr().err
