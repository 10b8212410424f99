"""The pod of a worker: what it is told, what a podTemplate may change, and what stays ours."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import protocol
from twinpool.core.protocol import WorkerConfig
from twinpool.operator.logic import names
from twinpool.operator.logic.pods import gpus, with_revision, worker_template
from twinpool.operator.logic.settings import VLLM_IMAGE, Settings
from twinpool.operator.logic.weights import model_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]


def template(pool: InferencePool, role: str = "decode", settings: Settings | None = None) -> dict[str, Any]:
    return worker_template(pool, role, names.roles(pool)[role], settings or Settings())


def engine(rendered: dict[str, Any]) -> dict[str, Any]:
    (found,) = [item for item in rendered["spec"]["containers"] if item.get("name") == protocol.ENGINE_CONTAINER]
    return found


def config(rendered: dict[str, Any]) -> WorkerConfig:
    env = {item.get("name"): item.get("value", "") for item in engine(rendered)["env"]}
    return WorkerConfig.from_json(env[protocol.WORKER_CONFIG_ENV])


def test_a_plain_worker(make_pool: Make) -> None:
    rendered = template(make_pool({"decode": {"parallelism": {"tensor": 4}}}))
    spec, container = rendered["spec"], engine(rendered)
    assert container["image"] == VLLM_IMAGE
    assert container["command"] == ["python3", "/twinpool/worker.pyz", "run"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"engine": 8000, "launcher": 8090}
    assert spec["initContainers"][0]["command"] == ["twinpool-worker", "inject", "/twinpool"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["terminationGracePeriodSeconds"] == 315
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in spec["volumes"]
    assert "serviceAccountName" not in spec
    assert config(rendered) == WorkerConfig(
        pool="demo",
        namespace="team",
        role="decode",
        revision="",
        engine="vllm",
        model="acme/model",
        model_path="acme/model",
        tensor=4,
        gpus=4,
        connector="nixl",
    )


def test_every_field_of_a_role_reaches_the_pod(make_pool: Make) -> None:
    pool = make_pool(
        {
            "model": {"source": "pvc://weights/llama/8b", "maxModelLen": 4096, "secretRef": {"name": "hf"}},
            "engine": {
                "image": "mine:1",
                "imagePullSecrets": [{"name": "registry"}],
                "python": "/opt/python",
                "args": ["--a"],
                "env": [
                    {"name": "A", "value": "pool"},
                    {"name": "B", "value": "b"},
                    {"name": "HF_TOKEN", "value": "x"},
                ],
            },
            "decode": {
                "engine": {"args": ["--b"], "env": [{"name": "A", "value": "role"}]},
                "resources": {"cpu": "2", "memory": "16Gi", "shm": "1Gi", "gpu": {"resource": "amd.com/gpu"}},
                "serviceAccountName": "sa",
                "scheduling": {
                    "nodeSelector": {"zone": "a"},
                    "tolerations": [{"key": "gpu", "operator": "Exists"}],
                    "priorityClassName": "high",
                    "schedulerName": "other",
                    "runtimeClassName": "nvidia",
                },
                "startupTimeout": "1h",
                "drainTimeout": "1500ms",
            },
        }
    )
    rendered = template(pool)
    spec, container, told = rendered["spec"], engine(rendered), config(rendered)
    env = {item["name"]: item for item in container["env"]}
    assert (container["image"], container["command"][0]) == ("mine:1", "/opt/python")
    assert container["resources"] == {
        "requests": {"cpu": "2", "memory": "16Gi"},
        "limits": {"memory": "16Gi", "amd.com/gpu": "1"},
    }
    assert env["A"]["value"] == "role"
    assert env["B"]["value"] == "b"
    assert env["HF_TOKEN"] == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "HF_TOKEN"}}}
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in container["volumeMounts"]
    claim = {"claimName": "weights", "readOnly": True}
    assert {"name": "model", "persistentVolumeClaim": claim} in spec["volumes"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["serviceAccountName"] == "sa"
    assert spec["nodeSelector"] == {"zone": "a"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert (spec["priorityClassName"], spec["schedulerName"], spec["runtimeClassName"]) == ("high", "other", "nvidia")
    assert spec["terminationGracePeriodSeconds"] == 17
    assert (told.model_path, told.max_model_len, told.args) == ("/models/llama/8b", 4096, ("--a", "--b"))
    assert (told.startup_timeout, told.drain_timeout) == (3600.0, 1.5)


def test_an_aggregated_pool_has_no_connector(make_pool: Make) -> None:
    told = config(template(make_pool(prefill=None)))
    assert (told.role, told.connector) == ("aggregated", None)


def test_a_preflight_can_be_skipped(make_pool: Make) -> None:
    assert config(template(make_pool())).preflight
    assert not config(template(make_pool(engine={"preflight": False}))).preflight


def test_engines_publish_what_they_cache_only_when_asked_to(make_pool: Make) -> None:
    assert not config(template(make_pool())).kv_events
    made = template(make_pool(engine={"kvEvents": True}))
    assert config(made).kv_events
    ports = {port["name"]: port["containerPort"] for port in made["spec"]["containers"][0]["ports"]}
    assert ports == {"engine": 8000, "launcher": 8090, "kv-events": 5557, "kv-replay": 5577}


def test_speculation_is_the_pools_and_the_number_of_tokens_the_roles(make_pool: Make) -> None:
    pool = make_pool(
        {
            "speculation": {"method": "eagle3", "model": "org/draft"},
            "decode": {"speculation": {"tokens": 3}},
        }
    )
    decode, prefill = config(template(pool)), config(template(pool, "prefill"))
    assert (decode.speculation, decode.draft_model, decode.draft_tokens) == ("eagle3", "org/draft", 3)
    assert (prefill.speculation, prefill.draft_model, prefill.draft_tokens) == ("eagle3", "org/draft", 0)
    auto = make_pool({"speculation": {"method": "ngram"}, "decode": {"speculation": {"tokens": "auto"}}})
    assert config(template(auto)).draft_tokens == 0
    assert config(template(make_pool())).speculation is None


def test_launchers_are_told_the_operators_version(make_pool: Make) -> None:
    assert config(template(make_pool(), settings=Settings(version="1.2"))).operator_version == "1.2"


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        (None, {"emptyDir": {}}),
        ({"hostPath": "/var/lib/w"}, {"hostPath": {"path": "/var/lib/w", "type": "DirectoryOrCreate"}}),
        ({"claim": "weights"}, {"persistentVolumeClaim": {"claimName": "weights"}}),
    ],
)
def test_weights_of_the_hub_have_a_place(make_pool: Make, cache: Any, volume: Any) -> None:
    made = template(make_pool({"model": {"cache": cache}} if cache else None))
    assert {"name": "weights", **volume} in made["spec"]["volumes"]
    assert {"name": "weights", "mountPath": "/twinpool-weights"} in engine(made)["volumeMounts"]
    assert {"name": "HF_HOME", "value": "/twinpool-weights"} in engine(made)["env"]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"engine": {"kind": "simulated"}}, False),
        ({"model": {"source": "file:///m"}}, False),
        ({"model": {"source": "file:///m"}, "speculation": {"method": "eagle3", "model": "/m/draft"}}, False),
        ({"model": {"source": "file:///m"}, "speculation": {"method": "eagle3", "model": "org/draft"}}, True),
    ],
)
def test_only_what_is_fetched_has_a_place(make_pool: Make, changes: dict[str, Any], kept: bool) -> None:
    made = template(make_pool(changes))
    assert any(volume["name"] == "weights" for volume in made["spec"]["volumes"]) == kept


def test_a_place_of_the_users_own_stays(make_pool: Make) -> None:
    own = {"name": "HF_HUB_CACHE", "value": "/data"}
    assert not [
        entry for entry in engine(template(make_pool(engine={"env": [own]})))["env"] if entry["name"] == "HF_HOME"
    ]


def test_a_model_on_a_volume_may_be_checked(make_pool: Make) -> None:
    checksum = f"sha256:{'0' * 64}"
    made = make_pool({"model": {"source": "pvc://weights/m", "checksum": checksum}})
    assert config(template(made)).model_checksum == checksum


def test_weights_in_an_image_are_mounted(make_pool: Make) -> None:
    made = template(make_pool({"model": {"source": "oci://registry:5000/org/m:1#8b"}}))
    volumes = {volume.pop("name"): volume for volume in made["spec"]["volumes"]}
    assert volumes["model"] == {"image": {"reference": "registry:5000/org/m:1", "pullPolicy": "IfNotPresent"}}
    assert {"name": "model", "mountPath": "/models", "readOnly": True} in engine(made)["volumeMounts"]


def test_balancing_of_experts_is_a_roles(make_pool: Make) -> None:
    wide = {"parallelism": {"data": 8, "expert": True}, "expertBalancing": {"redundantExperts": 32, "interval": 500}}
    told = config(template(make_pool({"decode": wide})))
    assert (told.expert_balancing, told.redundant_experts, told.expert_interval) == (True, 32, 500)
    assert not config(template(make_pool())).expert_balancing


def test_copies_of_the_layers_are_ranks_of_the_group(make_pool: Make) -> None:
    pool = make_pool({"decode": {"parallelism": {"tensor": 2, "data": 8, "expert": True}}})
    told = config(template(pool))
    assert (told.tensor, told.data, told.nodes, told.gpus, told.expert) == (2, 8, 2, 8, True)


def test_the_roles_are_told_apart(make_pool: Make) -> None:
    assert config(template(make_pool(), "prefill")).role == "prefill"


def test_a_role_may_have_its_own_image(make_pool: Make) -> None:
    pool = make_pool({"engine": {"image": "pool:1"}, "decode": {"engine": {"image": "role:1"}}})
    assert engine(template(pool))["image"] == "role:1"
    assert engine(template(pool, "prefill"))["image"] == "pool:1"


def test_the_simulated_engine_comes_with_the_launcher_and_needs_no_gpu(make_pool: Make) -> None:
    pool = make_pool({"engine": {"kind": "simulated"}})
    rendered = template(pool, settings=Settings(worker_image="w:1"))
    assert engine(rendered)["image"] == "w:1"
    assert engine(rendered)["resources"] == {}
    assert gpus(pool, pool.spec.decode) == 0


def test_no_gpu_on_a_node_without(make_pool: Make) -> None:
    pool = make_pool({"decode": {"resources": {"gpu": {"perNode": 0}}}})
    assert gpus(pool, pool.spec.decode) == 0


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (None, "acme/model"),
        ("hf://org/other", "org/other"),
        ("file:///data/m", "/data/m"),
        ("pvc://claim", "/models"),
        ("pvc://claim/a/b/", "/models/a/b"),
        ("oci://registry:5000/org/m:1", "/models"),
        ("oci://registry/org/m@sha256:0a#weights/8b", "/models/weights/8b"),
    ],
)
def test_where_the_model_is(make_pool: Make, source: str | None, path: str) -> None:
    assert model_path(make_pool({"model": {"source": source}} if source else None)) == path


def test_a_pod_template_has_the_last_word_on_what_is_not_ours(make_pool: Make) -> None:
    over = {
        "metadata": {"annotations": {"note": "x"}, "labels": {"team": "a"}},
        "spec": {
            "hostNetwork": True,
            "containers": [
                {
                    "name": "engine",
                    "resources": {"limits": {"vendor.com/nic": "1"}},
                    "env": [{"name": "EXTRA", "value": "1"}],
                    "ports": [{"name": "debug", "containerPort": 9999}],
                    "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                    "lifecycle": {"preStop": {"exec": {"command": ["true"]}}},
                },
                {"name": "sidecar", "image": "s"},
            ],
            "initContainers": [{"name": "warm", "image": "w"}],
            "volumes": [{"name": "cache", "hostPath": {"path": "/cache"}}],
        },
    }
    rendered = template(make_pool({"decode": {"podTemplate": over}}))
    spec, container = rendered["spec"], engine(rendered)
    assert rendered["metadata"]["annotations"] == {"note": "x"}
    assert rendered["metadata"]["labels"]["team"] == "a"
    assert spec["hostNetwork"] is True
    assert [item["name"] for item in spec["containers"]] == ["engine", "sidecar"]
    assert [item["name"] for item in spec["initContainers"]] == ["twinpool-inject", "warm"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "vendor.com/nic": "1"}
    assert {"name": "EXTRA", "value": "1"} in container["env"]
    assert {"name": "debug", "containerPort": 9999} in container["ports"]
    assert {"name": "cache", "mountPath": "/cache"} in container["volumeMounts"]
    assert "lifecycle" in container
    assert {"name": "cache", "hostPath": {"path": "/cache"}} in spec["volumes"]


HOSTILE: dict[str, Any] = {
    "metadata": {"labels": {protocol.LABEL_POOL: "other"}, "name": "x", "finalizers": ["y"]},
    "spec": {
        "restartPolicy": "Never",
        "schedulingGates": [{"name": "g"}],
        "readinessGates": [{"conditionType": "c"}],
        "containers": [
            {
                "name": "engine",
                "command": ["sh"],
                "args": ["-c"],
                "startupProbe": {},
                "readinessProbe": {"exec": {"command": ["true"]}},
                "livenessProbe": {"exec": {"command": ["true"]}},
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "env": [{"name": "POD_IP", "value": "1.1.1.1"}, {"name": "TWINPOOL_X", "value": "1"}],
                "ports": [{"name": "engine", "containerPort": 1}, {"name": "x", "containerPort": 8000}],
                "volumeMounts": [{"name": "other", "mountPath": "/twinpool"}],
            }
        ],
        "initContainers": [{"name": "twinpool-inject", "command": ["sh"], "args": ["x"], "restartPolicy": "Always"}],
        "volumes": [{"name": "twinpool", "hostPath": {"path": "/"}}],
    },
}


def test_a_pod_template_cannot_change_what_is_ours(make_pool: Make) -> None:
    plain, rendered = template(make_pool()), template(make_pool({"decode": {"podTemplate": HOSTILE}}))
    assert rendered == plain


@pytest.mark.parametrize(
    "odd",
    [
        {"spec": "x", "metadata": "y"},
        {"spec": {"containers": "x", "initContainers": {}, "volumes": 1}},
        {"spec": {"containers": [{"image": "nameless"}, "x"]}},
        {"spec": {"containers": [{"name": "engine", "env": "x", "ports": 1, "volumeMounts": [1]}]}},
        {"spec": {"containers": [{"name": "engine", "env": [{"value": "nameless"}]}]}},
        {"metadata": {"labels": "x", "annotations": 1}},
        {"spec": None, "metadata": None},
        {"spec": {"containers": None, "initContainers": None, "volumes": None}},
    ],
)
def test_an_odd_pod_template_leaves_a_worker(make_pool: Make, odd: dict[str, Any]) -> None:
    rendered = with_revision(template(make_pool({"decode": {"podTemplate": odd}})), "abc")
    assert engine(rendered)["command"][-1] == "run"
    assert config(rendered).pool == "demo"
    assert rendered["spec"]["initContainers"][0]["name"] == "twinpool-inject"
    assert rendered["metadata"]["labels"][protocol.LABEL_POOL] == "demo"


def test_the_revision_is_in_the_labels_and_in_what_the_launcher_is_told(make_pool: Make) -> None:
    side = {"spec": {"containers": [{"name": "side", "env": [{"name": protocol.WORKER_CONFIG_ENV, "value": "?"}]}]}}
    revised = with_revision(template(make_pool({"decode": {"podTemplate": side}})), "abc")
    assert revised["metadata"]["labels"][protocol.LABEL_REVISION] == "abc"
    assert config(revised).revision == "abc"
    assert revised["spec"]["containers"][1]["env"][0]["value"] == "?"


def test_a_template_is_plain_json(make_pool: Make) -> None:
    rendered = template(make_pool())
    assert json.loads(json.dumps(rendered)) == rendered
