"""What an administrator set for all pools: pods have it, a pool's own fields win, and no worker is restarted for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import protocol
from twinpool.core.pod_defaults import PodDefaults
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Apply
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.pods import worker_template
from twinpool.operator.logic.router_objects import router_objects
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.operator.conftest import ModelCluster
    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]

GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
SHARED = PodDefaults.model_validate(
    {
        "labels": {"team": "serving", protocol.LABEL_POOL: "forged"},
        "annotations": {"example.com/owner": "serving"},
        "imagePullSecrets": [{"name": "mirror"}],
        "router": {"priorityClassName": "high", "tolerations": [{"key": "infra", "operator": "Exists"}]},
        "worker": {
            "nodeSelector": {"gpu": "yes"},
            "tolerations": [GPU],
            "priorityClassName": "low",
            "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}, {"name": "POD_IP", "value": "forged"}],
        },
    }
)
SETTINGS = Settings(pods=SHARED)


def worker(pool: InferencePool, settings: Settings = SETTINGS) -> dict[str, Any]:
    return worker_template(pool, "decode", names.roles(pool)["decode"], settings)


def router(pool: InferencePool, settings: Settings = SETTINGS) -> dict[str, Any]:
    (made,) = [body for body in router_objects(pool, settings, 0) if body["kind"] == "Deployment"]
    template: dict[str, Any] = made["spec"]["template"]
    return template


def variables(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in template["spec"]["containers"][0]["env"]}


def test_workers_have_them(make_pool: Make) -> None:
    pool = make_pool()
    made = worker(pool)
    spec = made["spec"]
    assert made["metadata"]["labels"] == {**names.labels(pool, "decode"), "team": "serving"}
    assert made["metadata"]["annotations"] == {"example.com/owner": "serving"}
    assert (spec["nodeSelector"], spec["tolerations"], spec["priorityClassName"]) == ({"gpu": "yes"}, [GPU], "low")
    assert spec["imagePullSecrets"] == [{"name": "mirror"}]
    assert variables(made)["HTTPS_PROXY"]["value"] == "http://proxy:3128"
    assert "value" not in variables(made)["POD_IP"], "what Twinpool sets stays its own"


def test_routers_have_theirs(make_pool: Make) -> None:
    pool = make_pool()
    made = router(pool)
    spec = made["spec"]
    assert made["metadata"]["labels"] == {**names.labels(pool, names.ROUTER), "team": "serving"}
    assert (spec["tolerations"], spec["priorityClassName"]) == ([{"key": "infra", "operator": "Exists"}], "high")
    assert spec["imagePullSecrets"] == [{"name": "mirror"}]
    assert "nodeSelector" not in spec
    assert "HTTPS_PROXY" not in variables(made), "routers dial pods only"


def test_what_a_pool_says_wins(make_pool: Make) -> None:
    hidden = {"name": "HTTPS_PROXY", "valueFrom": {"secretKeyRef": {"name": "proxy", "key": "url"}}}
    decode = {
        "scheduling": {"tolerations": [{"key": "mine"}], "priorityClassName": "mine", "nodeSelector": {"gpu": "h100"}},
        "engine": {"env": [hidden]},
        "podTemplate": {"metadata": {"labels": {"team": "mine"}, "annotations": {"example.com/owner": "me"}}},
    }
    engine = {"imagePullSecrets": [{"name": "own"}]}
    made = worker(make_pool({"decode": decode, "engine": engine}))
    spec = made["spec"]
    assert made["metadata"]["labels"]["team"] == "mine"
    assert made["metadata"]["annotations"]["example.com/owner"] == "me"
    assert (spec["tolerations"], spec["priorityClassName"]) == ([{"key": "mine"}], "mine")
    assert spec["nodeSelector"] == {"gpu": "h100"}
    assert spec["imagePullSecrets"] == [{"name": "mirror"}, {"name": "own"}], "both may be needed"
    assert variables(made)["HTTPS_PROXY"] == hidden


@pytest.mark.parametrize("template", [worker, router])
def test_without_defaults_nothing_changes(make_pool: Make, template: Callable[..., Any]) -> None:
    assert "priorityClassName" not in template(make_pool(), Settings())["spec"]
    assert "annotations" not in template(make_pool(), Settings())["metadata"]


def test_a_change_reaches_routers_and_restarts_no_worker(make_pool: Make, model_cluster: type[ModelCluster]) -> None:
    cluster = model_cluster(make_pool({"decode": {"replicas": 2}}))
    cluster.settle()
    before = {name: pod.uid for name, pod in cluster.pods.items() if pod.role == "decode"}
    sets = {key: body for key, body in cluster.objects.items() if key[0] == "StatefulSet"}
    (action,) = plan(cluster.observed(), SETTINGS, cluster.now).actions
    assert isinstance(action, Apply)
    assert action.kind == "Deployment"
    cluster.carry_out(action)
    assert plan(cluster.observed(), SETTINGS, cluster.now).actions == ()
    assert {name: pod.uid for name, pod in cluster.pods.items() if pod.role == "decode"} == before
    assert {key: body for key, body in cluster.objects.items() if key[0] == "StatefulSet"} == sets
