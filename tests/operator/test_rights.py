"""What the operator asks for is what it is given, no less and no more; and an older CRD is noticed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from twinpool.core.crd import custom_resource_definition
from twinpool.operator.logic.rights import (
    COMPUTE_DOMAIN_RIGHTS,
    LEASE_RIGHTS,
    PLACEMENT_RIGHTS,
    RIGHTS,
    Right,
    attributes,
    in_words,
    missing_fields,
)

DEPLOY = Path(__file__).parents[2] / "deploy"
SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def granted(kind: str, file: str = "operator.yaml") -> set[tuple[str, str, str]]:
    (role,) = [body for body in yaml.safe_load_all((DEPLOY / file).read_text()) if body["kind"] == kind]
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def asked(rights: tuple[Right, ...]) -> set[tuple[str, str, str]]:
    return {(right.group, right.resource, verb) for right in rights for verb in right.verbs}


def test_the_rights_that_are_checked_are_those_of_the_manifest() -> None:
    assert asked(RIGHTS + PLACEMENT_RIGHTS + COMPUTE_DOMAIN_RIGHTS) == granted("ClusterRole"), (
        "keep logic/rights.py and deploy/operator.yaml equal"
    )
    assert asked(LEASE_RIGHTS) == granted("Role")
    assert asked(RIGHTS + COMPUTE_DOMAIN_RIGHTS + LEASE_RIGHTS) == granted("Role", "namespaced/operator.yaml")


def test_the_operator_of_one_namespace_differs_in_its_scope_alone() -> None:
    """Everything is in the one namespace, which a user puts in by one substitution."""
    text = (DEPLOY / "namespaced" / "operator.yaml").read_text()
    bodies = {body["kind"]: body for body in yaml.safe_load_all(text)}
    assert set(bodies) == {"ServiceAccount", "Role", "RoleBinding", "Deployment"}
    assert {body["metadata"]["namespace"] for body in bodies.values()} == {"team-a"}
    assert [subject["namespace"] for subject in bodies["RoleBinding"]["subjects"]] == ["team-a"]
    everywhere = {body["kind"]: body for body in yaml.safe_load_all((DEPLOY / "operator.yaml").read_text())}
    containers = [
        body["spec"]["template"]["spec"]["containers"] for body in (everywhere["Deployment"], bodies["Deployment"])
    ]
    (more,) = [entry for entry in containers[1][0]["env"] if entry not in containers[0][0]["env"]]
    assert more == {"name": "TWINPOOL_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
    containers[1][0]["env"].remove(more)
    assert containers[0] == containers[1]


def test_a_question_names_what_it_is_about() -> None:
    status = Right("g", "pools/status", ("patch",))
    assert attributes(status, "patch", "") == {
        "group": "g",
        "resource": "pools",
        "subresource": "status",
        "verb": "patch",
    }
    lease = Right("", "leases", ("create", "get"))
    assert attributes(lease, "get", "n", "x") == {"resource": "leases", "verb": "get", "namespace": "n", "name": "x"}
    assert "name" not in attributes(lease, "create", "n", "x"), "what is created has no name yet"


def test_missing_rights_in_words() -> None:
    missing = [(Right("apps", "statefulsets", ()), "patch"), (Right("", "pods", ()), "watch")]
    assert in_words([*missing, (missing[0][0], "create")]) == "pods: watch; statefulsets.apps: patch, create"


def test_our_own_schema_misses_nothing() -> None:
    assert missing_fields(SCHEMA, SCHEMA) == []


def without(path: str) -> Any:
    served = copy.deepcopy(SCHEMA)
    *parents, last = path.split("/")
    place = served
    for name in parents:
        place = place[name]
    del place[last]
    return served


def test_fields_that_are_not_served_are_named() -> None:
    assert missing_fields(SCHEMA, without("properties/status/properties/ratio")) == ["status.ratio"]
    assert missing_fields(SCHEMA, without("properties/spec/properties/model/properties/name")) == ["spec.model.name"]
    inner = "properties/status/properties/conditions/items/properties/observedGeneration"
    assert missing_fields(SCHEMA, without(inner)) == ["status.conditions[].observedGeneration"]


def test_fields_that_only_the_server_knows_are_newer() -> None:
    served = copy.deepcopy(SCHEMA)
    served["properties"]["spec"]["properties"]["novelty"] = {"type": "string"}
    assert missing_fields(SCHEMA, served) == []


def test_a_part_that_takes_everything_misses_nothing() -> None:
    assert missing_fields({"properties": {"a": {}}}, {"x-kubernetes-preserve-unknown-fields": True}) == []
