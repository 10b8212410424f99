"""The renderers of a pool: what their pods are, when they go, and what is said of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import protocol
from twinpool.core.pod_defaults import PodDefaults
from twinpool.core.protocol import WorkerConfig
from twinpool.operator.logic.actions import Apply, Delete
from twinpool.operator.logic.asking import to_ask
from twinpool.operator.logic.books import Report, read_report
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.observed import ContainerView, Observed, PodView, Termination
from twinpool.operator.logic.renderer_objects import renderer_objects, statement
from twinpool.operator.logic.settings import VLLM_IMAGE, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]

KNOWS = {"engine": {"kvEvents": True}, "routing": {"policy": "price", "renderer": {"replicas": 2}}}


def deployment(pool: InferencePool, settings: Settings | None = None) -> dict[str, Any]:
    service, made = renderer_objects(pool, settings or Settings(), "rev1")
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    return made


def test_a_renderer_is_the_engines_image_without_gpus_and_without_rights(make_pool: Make) -> None:
    made = deployment(make_pool({**KNOWS, "decode": {"parallelism": {"tensor": 8}, "startupTimeout": "10m"}}))
    template = made["spec"]["template"]
    spec, (container,) = template["spec"], template["spec"]["containers"]
    assert (made["metadata"]["name"], made["spec"]["replicas"]) == ("demo-renderer", 2)
    assert made["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert template["metadata"]["labels"][protocol.LABEL_REVISION] == "rev1"
    assert protocol.LABEL_REVISION not in made["spec"]["selector"]["matchLabels"], "a selector cannot be changed"
    assert spec["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in spec
    assert container["image"] == VLLM_IMAGE
    assert container["command"] == ["python3", "/twinpool/worker.pyz", "render"]
    assert container["resources"] == {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 600
    assert [port["name"] for port in container["ports"]] == ["engine"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    told = WorkerConfig.from_json(env[protocol.WORKER_CONFIG_ENV] or "")
    assert (told.model, told.tensor, told.nodes) == ("acme/model", 1, 1)
    assert protocol.NODE_RANK_ENV not in env


def test_a_renderer_finds_the_model_and_the_defaults_of_the_cluster(make_pool: Make) -> None:
    defaults = PodDefaults.model_validate(
        {
            "router": {"nodeSelector": {"pool": "cpu"}},
            "worker": {"nodeSelector": {"pool": "gpu"}, "env": [{"name": "HF_ENDPOINT", "value": "https://mirror"}]},
        }
    )
    pool = make_pool(
        {
            "engine": {"kvEvents": True, "kind": "simulated", "imagePullSecrets": [{"name": "registry"}]},
            "model": {"source": "pvc://weights/llama"},
            "routing": {"policy": "price", "renderer": {"podTemplate": {"spec": {"hostname": "here"}}}},
        }
    )
    spec = deployment(pool, Settings(pods=defaults))["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert (spec["nodeSelector"], spec["hostname"]) == ({"pool": "cpu"}, "here")
    assert {"name": "HF_ENDPOINT", "value": "https://mirror"} in container["env"]
    assert container["image"] == Settings().worker_image
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]


def test_a_pool_without_renderers_has_no_objects_of_any(make_pool: Make) -> None:
    assert renderer_objects(make_pool(), Settings(), "r") == []
    none = make_pool({**KNOWS, "routing": {"policy": "price", "renderer": {"replicas": 0}}})
    assert renderer_objects(none, Settings(), "r") == []
    assert statement(Observed(none), (), "r") == []


def test_renderers_come_and_go_with_the_field(make_pool: Make, model_cluster: Callable[..., Any]) -> None:
    cluster = model_cluster(make_pool(KNOWS))
    cluster.settle()
    assert {("Deployment", "demo-renderer"), ("Service", "demo-renderer")} <= cluster.objects.keys()
    labels = cluster.objects["Deployment", "demo-renderer"]["spec"]["template"]["metadata"]["labels"]
    assert labels[protocol.LABEL_REVISION] == cluster.pool.status.revision
    assert not any(isinstance(action, Apply | Delete) for action in cluster.planned())
    cluster.pool = cluster.pool.model_copy(update={"spec": make_pool({"engine": {"kvEvents": True}}).spec})
    gone = {(action.kind, action.name) for action in cluster.planned() if isinstance(action, Delete)}
    assert gone == {("Deployment", "demo-renderer"), ("Service", "demo-renderer")}
    cluster.settle()
    assert not {("Deployment", "demo-renderer"), ("Service", "demo-renderer")} & cluster.objects.keys()


def pod(**changes: Any) -> PodView:
    return dataclasses.replace(PodView("demo-renderer-1", "renderer"), **changes)


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ((), ("False", "RendererNotReady", "no renderer pod is ready")),
        ((pod(ready=True),), ("True", "Serving", "1 of 2 renderer pods are ready")),
        ((pod(ready=True, deadline=1.0),), ("False", "RendererNotReady", "no renderer pod")),
        (
            (pod(containers=(ContainerView("renderer", "i", terminated=Termination("Error", 1, "no tokenizer")),)),),
            ("False", "ContainerFailed", "no tokenizer"),
        ),
    ],
)
def test_the_pool_says_whether_prompts_are_rendered(
    make_pool: Make, pods: tuple[PodView, ...], expected: tuple[str, str, str]
) -> None:
    (said,) = statement(Observed(make_pool(KNOWS), pods=pods), (), "r")
    assert (said.type, said.status, said.reason) == ("Rendering", *expected[:2])
    assert expected[2] in said.message


def test_the_pool_says_when_engines_read_other_tokens(make_pool: Make) -> None:
    heard = {"a": Report(), "b": Report(distrusts=True), "c": None}
    (said,) = statement(Observed(make_pool(KNOWS), pods=(pod(ready=True),), reports=heard), (), "r")
    assert (said.status, said.reason) == ("False", "OtherTokens")
    assert said.message.startswith("b saw engines read other tokens")
    report = read_report({"endpoints": [], "synced": True, "current": True, "distrustsRenderers": True})
    assert report is not None
    assert report.distrusts
    assert report.gist() != Report().gist()


def test_nothing_is_rendered_in_the_middle_of_a_rollout(make_pool: Make, model_cluster: Callable[..., Any]) -> None:
    cluster = model_cluster(make_pool(KNOWS))
    cluster.settle()
    observed = dataclasses.replace(cluster.observed(), pods=(pod(ready=True),))
    (said,) = statement(observed, groups(observed), "another")
    assert (said.status, said.reason) == ("Unknown", "Rollout")


def test_routers_of_a_pool_with_renderers_are_always_asked(make_pool: Make) -> None:
    router = PodView("r", "router", phase="Running", address="10.0.0.1")
    assert to_ask(Observed(make_pool(KNOWS), pods=(router,))) == [router]
    assert to_ask(Observed(make_pool({"engine": {"kvEvents": True}}), pods=(router,))) == []
