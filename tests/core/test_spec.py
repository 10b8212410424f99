from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from twinpool.core.crd import custom_resource_definition
from twinpool.core.spec import InferencePool, InferencePoolSpec, WorkerRole

SHORT: dict[str, Any] = {
    "apiVersion": "serving.twinpool.dev/v1alpha1",
    "kind": "InferencePool",
    "metadata": {"name": "llama"},
    "spec": {
        "model": {"name": "meta-llama/Llama-3.3-70B-Instruct"},
        "prefill": {"replicas": 2, "parallelism": {"tensor": 4}},
        "decode": {"replicas": 4, "parallelism": {"tensor": 4}},
        "objectives": {"ttft": "800ms", "itl": "40ms"},
    },
}


def _schema(*path: str) -> dict[str, Any]:
    node: dict[str, Any] = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path:
        node = node["items"] if name == "[]" else node["properties"][name]
    return node


def test_the_short_manifest_is_complete() -> None:
    pool = InferencePool.model_validate(SHORT)
    assert pool.spec.decode.resources.gpu.per_node == 8
    assert pool.spec.routing.replicas == 1
    assert pool.spec.handoff.connector == "nixl"


def test_writing_gives_back_what_was_read() -> None:
    assert InferencePool.model_validate(SHORT).to_manifest() == SHORT


def test_a_pool_without_prefill_is_aggregated() -> None:
    spec = InferencePoolSpec.model_validate({"model": {"name": "m"}, "decode": {}})
    assert spec.prefill is None


def test_fields_of_a_newer_version_do_not_stop_an_older_operator() -> None:
    InferencePoolSpec.model_validate({"model": {"name": "m", "warp": 9}, "decode": {}, "warping": {}})


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("objectives.ttft", {"objectives": {"ttft": "800"}}),
        ("decode.resources.memory", {"decode": {"resources": {"memory": "25GB"}}}),
        ("decode.resources.memory", {"decode": {"resources": {"memory": "25Gi "}}}),
        ("decode.resources.cpu", {"decode": {"resources": {"cpu": "two"}}}),
        ("engine.kind", {"engine": {"kind": "tgi"}}),
        ("decode.replicas", {"decode": {"replicas": -1}}),
    ],
)
def test_a_wrong_value_is_refused_and_its_field_named(field: str, spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        InferencePoolSpec.model_validate({"model": {"name": "m"}, "decode": {}} | spec)
    assert ".".join(str(part) for part in caught.value.errors()[0]["loc"]) == field


def test_pools_are_immutable() -> None:
    pool = InferencePool.model_validate(SHORT)
    with pytest.raises(ValidationError, match="frozen"):
        pool.spec.decode.replicas = 5  # type: ignore[misc]


def _walk(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, inner in schema.get("properties", {}).items():
        found += _walk(inner, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found += _walk(schema[key], f"{path}[]")
    return found


def test_the_crd_is_a_structural_schema() -> None:
    for path, schema in _walk(_schema()):
        assert "type" in schema or schema["x-kubernetes-int-or-string"], path
        assert not {"$ref", "anyOf", "allOf", "title", "$defs"} & schema.keys(), path


def test_every_field_has_a_description() -> None:
    for path, schema in _walk(_schema("spec")) + _walk(_schema("status")):
        if not path.endswith("[]"):
            assert schema.get("description"), path


def test_every_list_and_string_of_the_spec_is_bounded() -> None:
    for path, schema in _walk(_schema("spec")):
        kind = schema.get("type", "string")
        if kind == "array":
            assert "maxItems" in schema, path
        if kind == "string" and not path.endswith("[]"):
            assert "maxLength" in schema or "enum" in schema, path


def test_blocks_are_filled_in_by_the_api_server() -> None:
    assert _schema("spec", "decode", "resources")["default"] == {}
    assert _schema("spec", "decode", "resources", "gpu", "perNode")["default"] == 8


def test_an_optional_block_has_no_default() -> None:
    assert "default" not in _schema("spec", "prefill")
    assert "default" not in _schema("spec", "decode")


def test_one_violation_gives_one_message() -> None:
    ttft = _schema("spec", "objectives", "ttft")
    assert "pattern" not in ttft
    assert "800ms" in ttft["x-kubernetes-validations"][0]["message"]


def test_conditions_merge_by_type() -> None:
    conditions = _schema("status", "conditions")
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_unknown_fields_of_the_pod_template_are_kept() -> None:
    assert _schema("spec", "decode", "podTemplate")["x-kubernetes-preserve-unknown-fields"] is True


@given(
    replicas=st.integers(0, 1000), tensor=st.sampled_from([1, 2, 4, 8]), timeout=st.sampled_from(["90s", "30m", "2h"])
)
def test_any_role_survives_writing_and_reading(replicas: int, tensor: int, timeout: str) -> None:
    spec = {
        "model": {"name": "m"},
        "decode": {"replicas": replicas, "parallelism": {"tensor": tensor}, "startupTimeout": timeout},
    }
    pool = InferencePool.model_validate({"metadata": {"name": "a"}, "spec": spec})
    assert InferencePool.model_validate(pool.to_manifest()).spec == pool.spec


@pytest.mark.parametrize(
    ("parallelism", "per_node", "nodes"),
    [({}, 8, 1), ({"tensor": 8}, 8, 1), ({"tensor": 8, "pipeline": 2}, 8, 2), ({"tensor": 4}, 1, 4), ({}, 0, 1)],
)
def test_nodes_of_a_replica(parallelism: dict[str, int], per_node: int, nodes: int) -> None:
    role = WorkerRole.model_validate({"parallelism": parallelism, "resources": {"gpu": {"perNode": per_node}}})
    assert role.nodes == nodes
