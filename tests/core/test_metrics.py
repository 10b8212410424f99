"""Declared metrics: naming rules, what is written from them, and that the sources count nothing else."""

import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from twinpool.core.metrics import exposition, operator, router, worker
from twinpool.core.metrics.declare import TARGET_LABELS, Label, Metric, catalogue, problems
from twinpool.core.metrics.engine import METRICS as ENGINE
from twinpool.core.metrics.page import DECLARED, markdown
from twinpool.operator.logic.actions import DrainResult
from twinpool.operator.shell.metrics import Metrics
from twinpool.router.logic import metrics as router_metrics
from twinpool.worker.engines.simulated.logic.metrics import FAMILIES
from twinpool.worker.logic.causes import CAUSES
from twinpool.worker.logic.preflight import OUTCOMES, SIZES
from twinpool.worker.logic.supervisor import PHASES

ROOT = Path(__file__).parents[2]
PARTS = ("core", "operator", "router", "worker", "simulate", "cli")
GOOD = Metric("twinpool_router_waits_total", "counter", "Waits.", "here.py")


def sources() -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for part in PARTS
        for path in (ROOT / part / "twinpool").rglob("*.py")
        if "core/metrics/" not in str(path)
    }


def test_no_source_names_an_undeclared_metric():
    named = re.compile(r"\btwinpool_(?:router|worker|operator)_[a-z0-9_]*[a-z0-9]\b")
    for path, text in sources().items():
        for name in named.findall(text):
            assert name in DECLARED, f"{path} names {name}: declare it in core/twinpool/core/metrics"


def test_every_metric_of_a_router_is_counted_where_it_is_said_to_be():
    texts = sources()
    for metric in router.METRICS.values():
        assert f'"{metric.name}"' in texts[metric.made], f"{metric.name} is not counted in {metric.made}"


def test_every_metric_of_a_launcher_is_counted_where_it_is_said_to_be():
    texts = sources()
    for metric in worker.METRICS.values():
        assert f'"{metric.name.removeprefix("twinpool_worker_")}"' in texts[metric.made], metric.name


def test_the_operator_makes_every_metric_that_it_declares_and_updates_it_where_it_says():
    made = Metrics()
    exposed = {family.name for family in text_string_to_metric_families(made.text().decode())}
    assert exposed == {name.removesuffix("_total") for name in operator.METRICS}
    texts = sources()
    for attribute, collector in vars(made).items():
        name = getattr(collector, "_name", None)
        if name is not None:
            metric = operator.METRICS.get(f"{name}_total") or operator.METRICS[name]
            assert f"etrics.{attribute}." in texts[metric.made], f"{metric.made} does not update {attribute}"
    for name, metric in operator.METRICS.items():
        figure = name.removeprefix("twinpool_operator_pool_")
        assert figure == name or f'Figure("{figure}"' in texts[metric.made]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "router_waits_total"}, "names are"),
        ({"name": "twinpool_router_waits"}, "counters end in _total"),
        ({"kind": "gauge"}, "counters end in _total"),
        ({"name": "twinpool_router_waits_count", "kind": "gauge"}, "suffixes"),
        ({"name": "twinpool_router_wait_ms_total"}, "base units"),
        ({"unit": "seconds"}, "last word"),
        ({"unit": "parsecs", "name": "twinpool_router_waits_parsecs_total"}, "base unit"),
        ({"buckets": (1.0,)}, "a histogram has buckets"),
        ({"name": "twinpool_router_waits", "kind": "histogram", "buckets": (2.0, 1.0)}, "rising"),
        ({"text": "Waits"}, "whole sentences"),
        ({"labels": (Label("pod", "x", 1),)}, "taken by"),
        ({"labels": (Label("le", "x", 1),)}, "taken by"),
        ({"labels": (Label("Route", "x", 1),)}, "taken by"),
        ({"preset": (("a",),)}, "as many as labels"),
    ],
)
def test_a_declaration_that_breaks_a_rule_is_refused(change, says):
    broken = dataclasses.replace(GOOD, **change)
    with pytest.raises(ValueError, match=says) as refused:
        catalogue([broken])
    assert broken.name in str(refused.value)


def test_a_good_declaration_is_taken_once():
    assert list(problems(GOOD)) == []
    with pytest.raises(ValueError, match="declared twice"):
        catalogue([GOOD, GOOD])


def test_labels_have_room_for_the_values_that_the_parts_know():
    def most(name, label):
        return next(each.most for each in DECLARED[name].labels if each.name == label)

    assert get_args(DrainResult) == operator.DRAIN_RESULTS
    assert len(CAUSES) <= most("twinpool_worker_engine_losses_total", "cause")
    assert len(PHASES) <= most("twinpool_worker_phase", "phase")
    assert len(OUTCOMES) <= most("twinpool_worker_preflight_outcome", "outcome")
    assert len(SIZES) <= most("twinpool_worker_preflight_collective_seconds", "bytes")


def test_series_are_bounded_by_what_a_user_made():
    counts = {"workers": 5, "pools": 3, "keys": 2}
    assert DECLARED["twinpool_router_clients"].most_series(counts) == 1
    assert DECLARED["twinpool_router_endpoint_admitted"].most_series(counts) == 5 * 2
    assert DECLARED["twinpool_router_key_requests_total"].most_series(counts) == 2


def test_series_that_are_known_beforehand_start_at_zero():
    text = router_metrics.render(router_metrics.Numbers())
    samples = {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert samples["twinpool_router_broken_streams_total",] == 0
    assert samples["twinpool_router_turned_away_total", "full"] == 0
    assert samples["twinpool_router_queue_seconds_count",] == 0
    assert not [key for key in samples if key[0].startswith("twinpool_router_endpoint_admitted")]


def test_help_text_stays_on_one_line():
    metric = dataclasses.replace(GOOD, text="a\\b\nc.")
    assert exposition.header(metric)[0] == r"# HELP twinpool_router_waits_total a\\b\nc."


def test_the_engine_metrics_that_are_read_are_those_that_the_simulated_engine_gives():
    given = {f"vllm:{family.name}{'_total' if family.kind == 'counter' else ''}": family for family in FAMILIES}
    for name, metric in ENGINE.items():
        assert (given[name].kind, given[name].labels) == (metric.kind, metric.labels), name


def test_the_page_tells_of_every_metric():
    page = markdown()
    for name in (*DECLARED, *ENGINE):
        assert f"| `{name}` |" in page
    for label in ("namespace", "pod", "component"):
        assert label in TARGET_LABELS
    for metric in DECLARED.values():
        assert (ROOT / metric.made).is_file(), metric
