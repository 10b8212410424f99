"""Merging follows Kubernetes' strategic merge."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.operator.logic.merge import MERGE_KEYS, merge, merge_key

BASE: dict[str, Any] = {
    "containers": [{"name": "engine", "image": "a", "env": [{"name": "A", "value": "1"}]}],
    "tolerations": [{"key": "x"}],
    "nodeSelector": {"zone": "a"},
}


@pytest.mark.parametrize(
    ("over", "result"),
    [
        ({}, {}),
        ({"containers": [{"name": "engine", "image": "b"}]}, {"containers": [{**BASE["containers"][0], "image": "b"}]}),
        ({"containers": [{"name": "side"}]}, {"containers": [*BASE["containers"], {"name": "side"}]}),
        ({"tolerations": [{"key": "y"}]}, {"tolerations": [{"key": "y"}]}),
        ({"nodeSelector": {"rack": "r"}}, {"nodeSelector": {"zone": "a", "rack": "r"}}),
        ({"nodeSelector": None}, {"nodeSelector": ...}),
        ({"nodeSelector": "odd"}, {"nodeSelector": "odd"}),
        ({"hostNetwork": True}, {"hostNetwork": True}),
        ({"volumes": [{"name": "v"}]}, {"volumes": [{"name": "v"}]}),
        ({"containers": [{"image": "no name"}]}, {"containers": [{"image": "no name"}]}),
        ({"affinity": {"nodeAffinity": {"a": None, "b": 1}}}, {"affinity": {"nodeAffinity": {"b": 1}}}),
    ],
)
def test_merge(over: dict[str, Any], result: dict[str, Any]) -> None:
    expected = {key: value for key, value in {**BASE, **result}.items() if value is not ...}
    assert merge(BASE, over) == expected


def test_a_list_whose_entries_have_no_key_is_replaced() -> None:
    assert merge({"volumes": [{"emptyDir": {}}]}, {"volumes": [{"name": "v"}]}) == {"volumes": [{"name": "v"}]}


def test_environment_is_merged_by_name() -> None:
    over = {"containers": [{"name": "engine", "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}]}]}
    assert merge(BASE, over)["containers"][0]["env"] == [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}]


def test_ports_are_told_apart_by_protocol_which_is_tcp_by_default() -> None:
    assert merge_key("ports", {"containerPort": 1}) == merge_key("ports", {"containerPort": 1, "protocol": "TCP"})
    assert merge_key("ports", {"containerPort": 1}) != merge_key("ports", {"containerPort": 1, "protocol": "UDP"})


JSON = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*MERGE_KEYS, "name", "x"]), inner, max_size=4)
        | st.lists(st.fixed_dictionaries({"name": st.sampled_from("abc")}, optional={"x": inner}), max_size=3)
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from([*MERGE_KEYS, "spec"]), JSON, max_size=4)


@given(base=OBJECTS, over=OBJECTS)
def test_merging_twice_is_merging_once(base: dict[str, Any], over: dict[str, Any]) -> None:
    once = merge(base, over)
    assert merge(once, over) == once
