"""The figures of pools for Prometheus."""

from prometheus_client.parser import text_string_to_metric_families

from twinpool.core.metrics import operator
from twinpool.core.spec import InferencePool
from twinpool.operator.logic.figures import STATES, figures
from twinpool.operator.shell.metrics import Metrics

STATUS = {
    "prefill": {"desired": 2, "created": 3, "ready": 2, "routable": 1, "updated": 2, "summary": "1/2"},
    "decode": {"desired": 1, "created": 1, "ready": 1, "routable": 1, "updated": 1, "summary": "1/1"},
    "conditions": [{"type": "Ready", "status": "False", "reason": "NotRoutable", "message": "wait"}],
}


def pool(**spec):
    body = {"model": {"name": "m"}, "prefill": {"parallelism": {"tensor": 4}}, "decode": {}, **spec}
    return InferencePool.model_validate({"metadata": {"name": "llama", "namespace": "team"}, "spec": body})


def samples(metrics):
    return {
        (
            sample.name.removeprefix("twinpool_operator_pool_"),
            *(sample.labels[name] for name in operator.METRICS[sample.name].label_names),
        ): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
        if "_pool_" in sample.name
    }


def test_a_pool_is_told_of_until_it_goes():
    metrics = Metrics()
    metrics.pools.tell(("team", "llama"), figures(pool(objectives={"ttft": "800ms"}), STATUS))
    found = samples(metrics)
    assert found["groups", "team", "llama", "prefill", "created"] == 3
    assert found["gpus", "team", "llama", "prefill"] == 12
    assert found["objective_seconds", "team", "llama", "ttft"] == 0.8
    assert ("objective_seconds", "team", "llama", "itl") not in found
    assert found["condition", "team", "llama", "Ready", "False", "NotRoutable"] == 1
    metrics.pools.forget(("team", "llama"))
    assert samples(metrics) == {}


def test_another_leader_tells_of_all_pools():
    metrics = Metrics()
    metrics.pools.tell(("team", "llama"), figures(pool(), STATUS))
    metrics.pools.forget_all()
    assert samples(metrics) == {}


def test_a_pool_without_prefill_and_status_has_zeros():
    found = {(figure.metric, *figure.labels): figure.value for figure in figures(pool(prefill=None), {})}
    assert found == {("groups", "decode", state): 0 for state in STATES} | {("gpus", "decode"): 0}


def test_every_figure_is_declared_with_its_labels():
    for figure in figures(pool(objectives={"ttft": "1s", "itl": "20ms"}), STATUS):
        declared = operator.METRICS[f"twinpool_operator_pool_{figure.metric}"]
        assert len(declared.labels) == 2 + len(figure.labels)
