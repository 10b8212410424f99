"""Dashboards and alerts as data: what each must say, and that it reads declared metrics only."""

import json
import re
from pathlib import Path

import pytest
import yaml

from monitoring import __main__ as program
from monitoring import rules
from monitoring.boards import DASHBOARDS
from monitoring.grafana import render
from twinpool.core import bottleneck
from twinpool.core.crd import custom_resource_definition
from twinpool.core.metrics.engine import METRICS as ENGINE
from twinpool.core.metrics.page import DECLARED

PANELS = [(board, panel) for board in DASHBOARDS for panel in board.panels]
EXPRESSIONS = [
    *((f"{board.title} / {panel.title}", query.expr) for board, panel in PANELS for query in panel.queries),
    *((alert.name, alert.value) for alert in rules.ALERTS),
]
_NAME = re.compile(r"\b(?:twinpool_[a-z0-9_]+|vllm:[a-z0-9_]+)")
#: Series in promtool's notation also name metrics.
SERIES = [series for alert in rules.ALERTS for series, _ in (*alert.fires, *alert.quiet)]


def declared(name):
    known = {**DECLARED, **ENGINE}
    stem = re.sub(r"_(bucket|sum|count)$", "", name)
    return known.get(name) or (known.get(stem) if known.get(stem) and known[stem].kind == "histogram" else None)


@pytest.mark.parametrize("text", [*(expr for _, expr in EXPRESSIONS), *SERIES])
def test_only_declared_metrics_are_read(text):
    names = _NAME.findall(text)
    assert names
    for name in names:
        assert declared(name), f"{name} is not declared in core/twinpool/core/metrics"


@pytest.mark.parametrize(("where", "expr"), EXPRESSIONS)
def test_labels_are_those_of_the_metric_or_of_the_scrape(where, expr):
    for name, selector in re.findall(r"(twinpool_[a-z0-9_]+|vllm:[a-z0-9_]+)\{([^}]*)\}", expr):
        own = getattr(declared(name), "label_names", None) or declared(name).labels
        for label in re.findall(r"([a-z_]+)(?:=|!=|=~|!~)\"", selector):
            assert label in {*own, "namespace", "pool", "pod", "component"}, f"{where}: {name} has no label {label}"


def spec_fields(schema, path=()):
    """Yield the path of every field of a pool's spec; those of a role also without the role."""
    for name, inner in schema.get("properties", {}).items():
        yield ".".join((*path, name))
        yield from spec_fields(inner, (*path, name))
        if name in ("prefill", "decode"):
            yield from spec_fields(inner, path)


def test_fields_that_users_are_told_to_set_exist():
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    known = set(spec_fields(schema["properties"]["spec"]))
    advice = [Path(bottleneck.__file__).read_text(), (program.ROOT / "docs" / "explain.md").read_text()]
    advice += [panel.description for _, panel in PANELS]
    advice += [text for alert in rules.ALERTS for text in (alert.meaning, *alert.look, *alert.mend)]
    named = [field for text in advice for field in re.findall(r"`([a-z][A-Za-z]*(?:\.[a-z][A-Za-z]*)+)", text)]
    assert len(named) > 15
    for field in named:
        assert field in known, f"{field} is no field of a pool's spec"


@pytest.mark.parametrize(("where", "expr"), EXPRESSIONS)
def test_no_average_stands_for_a_latency(where, expr):
    for name in re.findall(r"([a-z_:]+_seconds)_sum", expr):
        assert "bytes" in expr, f"{where} shows the mean of {name}: show percentiles"


def test_every_panel_says_how_to_read_it():
    for board, panel in PANELS:
        assert len(panel.description) > 25, f"{board.title} / {panel.title}"
        assert panel.description.endswith("."), f"{board.title} / {panel.title}"
    titles = [(board.title, panel.title) for board, panel in PANELS]
    assert len(set(titles)) == len(titles)


def test_panels_of_a_pool_show_that_pool_alone():
    for board, panel in PANELS:
        for query in panel.queries:
            chosen = query.expr.count("$pool")
            metrics = len(_NAME.findall(query.expr))
            assert chosen == (metrics if board.per_pool else 0), f"{board.title} / {panel.title}: {query.expr}"


def test_dashboards_name_no_installation():
    for board in DASHBOARDS:
        made = json.loads(render(board))
        assert made["uid"] == board.uid
        panels = [panel for panel in made["panels"] if panel["type"] != "row"]
        assert len(panels) == len(board.panels)
        assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
        places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in made["panels"]}
        assert len(places) == len(made["panels"]), "panels lie on each other"


def test_rules_are_what_prometheus_reads_and_point_to_their_pages():
    groups = yaml.safe_load(rules.rule_file())["groups"]
    found = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    assert list(found) == [alert.name for alert in rules.ALERTS]
    for alert in rules.ALERTS:
        assert f"## What to do\n\n* {alert.mend[0]}" in rules.runbook(alert)
        assert found[alert.name]["annotations"]["runbook"] in program.files()
        assert (f"[{alert.name}]({alert.name}.md)") in rules.index()


def test_every_alert_is_tried_with_series_that_raise_it_and_series_that_do_not():
    tests = rules.unit_tests("alerts.yaml")["tests"]
    assert len(tests) == 2 * len(rules.ALERTS)
    assert {test["promql_expr_test"][0]["exp_samples"][0]["value"] for test in tests} == {0, 1}


def test_committed_files_are_fresh():
    assert program.stale() == []


def test_stale_missing_and_forgotten_files_are_found_and_mended(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "ROOT", tmp_path)
    assert program.main(["check"]) == 1
    assert "make generate" in capsys.readouterr().err
    assert program.main(["write"]) == 0
    assert program.main(["check"]) == 0
    forgotten = tmp_path / "docs" / "alerts" / "Old.md"
    forgotten.write_text("old")
    (tmp_path / "docs" / "alerts" / "README.md").write_text("edited")
    assert program.stale() == ["docs/alerts/Old.md", "docs/alerts/README.md"]
    assert program.main(["write"]) == 0
    assert not forgotten.exists()
    assert program.main([]) == 2
