"""A live object has drifted when it no longer says what was applied; additions of others are no drift."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from twinpool.operator.logic.drift import APPLIED_ANNOTATION, contains, digest, in_place, stamped
from twinpool.operator.logic.observed import read_child

WANTED: dict[str, Any] = stamped(
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "s", "namespace": "n", "labels": {"a": "1"}},
        "spec": {"selector": {"a": "1"}, "ports": [{"name": "http", "port": 80}]},
    }
)


def live(**spec: Any) -> dict[str, Any]:
    body = copy.deepcopy(WANTED)
    body["metadata"].update(uid="u", resourceVersion="1")
    body["spec"].update(spec)
    return body


def test_what_was_applied_is_in_place() -> None:
    assert in_place(read_child("Service", live(clusterIP="10.0.0.1")), WANTED)


def test_a_missing_child_is_not_in_place() -> None:
    assert not in_place(None, WANTED)


def test_a_child_on_its_way_out_is_left_alone() -> None:
    assert in_place(dataclasses.replace(read_child("Service", live(selector={})), deleting=True), WANTED)


def test_a_changed_value_is_drift() -> None:
    assert not in_place(read_child("Service", live(selector={"a": "2"})), WANTED)


def test_a_field_that_is_no_longer_wanted_is_found_by_the_digest() -> None:
    less = {**WANTED, "metadata": {**WANTED["metadata"], "annotations": {}}, "spec": {"selector": {"a": "1"}}}
    assert not in_place(read_child("Service", live()), stamped(less))


def test_a_value_that_the_server_spells_differently_is_settled_once_it_was_applied() -> None:
    child = read_child("Service", live(selector={"a": "one"}))
    assert in_place(dataclasses.replace(child, settled=digest(WANTED)), WANTED)


def test_the_digest_ignores_the_order_of_keys_and_itself() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert WANTED["metadata"]["annotations"][APPLIED_ANNOTATION] == digest(
        {**WANTED, "metadata": {k: v for k, v in WANTED["metadata"].items() if k != "annotations"}}
    )


@pytest.mark.parametrize(
    ("wanted", "there", "result"),
    [
        ({"a": {}}, {}, True),
        ({"a": {}}, {"a": {"x": 1}}, True),
        ({"selector": {"x": 1}}, {"selector": {"x": 1, "y": 2}}, False),
        ({"selector": {"x": 1}}, {"selector": {"x": 1}}, True),
        ({"a": []}, {"a": [1]}, False),
        ({"a": {"x": 1}}, {"a": [1]}, False),
        ({"a": [1]}, {"a": 1}, False),
        ({"a": [1, 2]}, {"a": [1, 2]}, True),
        ({"a": [1, 2]}, {"a": [2, 1]}, False),
        ({"a": [1]}, {"a": [1, 2]}, False),
        ({"env": [{"name": "A"}]}, {"env": [{"name": "B"}, {"name": "A", "value": ""}]}, True),
        ({"env": [{"name": "A"}]}, {"env": [{"name": "B"}]}, False),
        ({"env": [{"x": 1}]}, {"env": [{"name": "B", "x": 1}]}, True),
        ({"env": [{"name": "A"}]}, {"env": ["odd"]}, False),
    ],
)
def test_contains(wanted: Any, there: Any, result: bool) -> None:
    assert contains(there, wanted) is result
