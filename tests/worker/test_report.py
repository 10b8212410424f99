"""What the launcher's endpoint says."""

import json
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from twinpool.worker.logic import report
from twinpool.worker.logic.causes import CAUSES
from twinpool.worker.logic.report import Snapshot
from twinpool.worker.logic.supervisor import State
from twinpool.worker.logic.weights import Progress

READY = Snapshot(
    State(phase="ready", epoch=2, total_restarts=1, start_seconds=12.5, reason="", losses=(("Stuck", 3),)),
    "vllm",
    'a"b\\c\nd',
    "decode",
    "0.1.0",
    7,
)
NEW = Snapshot(State(), "simulated", "m", "prefill", "0.1.0")


def test_readyz():
    assert report.readyz(READY) == (200, '{"ready": true, "phase": "ready", "reason": "", "cause": ""}')
    code, body = report.readyz(NEW)
    assert code == 503
    assert json.loads(body)["reason"]


def test_status_shows_the_last_lines():
    lines = tuple(f"line {i}" for i in range(100))
    shown = json.loads(report.status(Snapshot(State(), "vllm", "m", "decode", "0.1.0", 7, lines)))
    assert shown["lastLines"] == list(lines[-50:])
    assert shown["engine"] == {"kind": "vllm", "pid": 7}
    assert (shown["phase"], shown["epoch"], shown["restarts"], shown["role"]) == ("new", 0, 0, "decode")


def test_metrics_parse_and_agree():
    families = {family.name: family for family in text_string_to_metric_families(report.metrics(READY))}
    assert families["twinpool_worker_info"].samples[0].labels["model"] == 'a"b\\c\nd'
    assert families["twinpool_worker_ready"].samples[0].value == 1
    phases = {sample.labels["phase"]: sample.value for sample in families["twinpool_worker_phase"].samples}
    assert [phase for phase, value in phases.items() if value] == ["ready"]
    assert families["twinpool_worker_engine_restarts"].samples[0].value == 1
    losses = {s.labels["cause"]: s.value for s in families["twinpool_worker_engine_losses"].samples}
    assert losses.keys() == CAUSES.keys()
    assert {cause: value for cause, value in losses.items() if value} == {"Stuck": 3}
    assert families["twinpool_worker_engine_warnings"].samples[0].value == 0
    assert families["twinpool_worker_engine_start_seconds"].samples[0].value == 12.5


def test_a_start_that_never_ended_has_no_duration():
    assert "start_seconds" not in report.metrics(NEW)


def test_a_pod_that_fetches_its_model_says_how_far_it_is():
    loading = replace(NEW, weights=Progress("downloading", 10**9, 4 * 10**9, "abc"))
    words = "weights are downloaded: 1.0 of 4.0 GB (25 %)"
    assert json.loads(report.readyz(loading)[1])["reason"] == words
    shown = json.loads(report.status(loading))
    assert shown["reason"] == words
    assert shown["weights"] == {"stage": "downloading", "bytes": 10**9, "total": 4 * 10**9, "commit": "abc"}
    assert "twinpool_worker_weights_bytes 1000000000" in report.metrics(loading)
    serving = replace(READY, weights=Progress("done", 4 * 10**9, 4 * 10**9, "abc"))
    assert json.loads(report.status(serving))["reason"] == ""
