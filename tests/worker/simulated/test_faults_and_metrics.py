"""Faults by name, and the text that Prometheus reads."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from twinpool.core.errors import InvalidValue
from twinpool.worker.engines.simulated.logic import faults
from twinpool.worker.engines.simulated.logic.faults import Faults
from twinpool.worker.engines.simulated.logic.metrics import FAMILIES, SPECULATION, Metrics, render


def test_faults_are_read_and_add_to_those_of_the_engine():
    base = faults.parse(["crash-at-start", "slow=0.5"])
    assert base == Faults(at_start="crash-at-start", slow=0.5)
    mid_stream = ["reset-mid-stream=2", "die-mid-stream=3", "stall-mid-stream=4"]
    assert faults.parse([" hang", "reset", "status=503", *mid_stream], base) == Faults(
        "crash-at-start", 503, 0.5, hang=True, reset=True, reset_after=2, die_after=3, stall_after=4
    )


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("explode", "is not a fault"),
        ("hang=3", "is not a fault"),
        ("status", "is not a fault"),
        ("crash-at-start=1", "is not a fault"),
        ("status=many", "is not a number"),
        ("status=200", "out of range"),
        ("slow=-1", "out of range"),
        ("slow=nan", "out of range"),
    ],
)
def test_a_wrong_fault_is_refused(entry, says):
    with pytest.raises(InvalidValue, match=says):
        faults.parse([entry])


def test_metrics_parse_and_carry_vllms_labels():
    metrics = Metrics()
    metrics.add("request_success", 2, "stop")
    metrics.set("num_requests_running", 3)
    metrics.observe("time_to_first_token_seconds", 0.03)
    metrics.observe("time_to_first_token_seconds", 1000.0)
    families = {family.name: family for family in text_string_to_metric_families(render([metrics], 'a"b\\c\nd'))}
    assert len(families) == len(FAMILIES)
    samples = {
        (sample.name, sample.labels.get("le"), sample.labels.get("finished_reason")): sample
        for family in families.values()
        for sample in family.samples
    }
    assert samples["vllm:request_success_total", None, "stop"].value == 2
    assert samples["vllm:num_requests_running", None, None].labels == {"engine": "0", "model_name": 'a"b\\c\nd'}
    assert samples["vllm:time_to_first_token_seconds_bucket", "0.02", None].value == 0
    assert samples["vllm:time_to_first_token_seconds_bucket", "0.04", None].value == 1
    assert samples["vllm:time_to_first_token_seconds_count", None, None].value == 2
    assert metrics.value("time_to_first_token_seconds") == 1000.03


def test_an_engine_that_drafts_has_counters_for_every_position_from_the_start():
    metrics = Metrics(positions=2)
    metrics.count_draft(2, 1)
    families = {family.name: family for family in text_string_to_metric_families(render([metrics], "m"))}
    assert len(families) == len(FAMILIES) + len(SPECULATION)
    by_position = {
        sample.labels["position"]: sample.value
        for sample in families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    }
    assert by_position == {"0": 1, "1": 0}
