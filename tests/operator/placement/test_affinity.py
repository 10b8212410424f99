"""Adding a node to an affinity, and telling kube-scheduler what is wished for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core import protocol
from twinpool.core.placement import Placement
from twinpool.core.topology import preset
from twinpool.operator.logic.placement.affinity import narrowing, pinned, terms, ungating, wishes, with_wishes

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
ONLY = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
EXISTS = {"key": "gpu", "operator": "Exists"}


def required(*given: dict[str, Any]) -> dict[str, Any]:
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(given)}}}


def patched(pod: dict[str, Any], patch: Any) -> dict[str, Any]:
    """Apply the three operations of a JSON patch that are used, as RFC 6902 says."""
    result = copy.deepcopy(pod)
    for entry in patch:
        *path, last = entry["path"].strip("/").split("/")
        at: Any = result
        for key in path:
            at = at[int(key)] if isinstance(at, list) else at[key]
        index = int(last) if isinstance(at, list) and last != "-" else last
        match entry["op"]:
            case "test":
                assert at[index] == entry["value"]
            case "remove":
                del at[index]
            case "add" if last == "-":
                at.append(entry["value"])
            case "add":
                at[index] = entry["value"]
    return result


@pytest.mark.parametrize(
    "affinity",
    [
        None,
        {"podAffinity": {}},
        {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        required({"matchExpressions": [EXISTS]}),
        required({"matchExpressions": [EXISTS]}, {"matchFields": [{**ONLY, "values": ["n1", "n2"]}]}),
    ],
)
def test_one_patch_sends_a_pod_to_one_node(affinity: dict[str, Any] | None) -> None:
    gates = [{"name": "other/gate"}, {"name": protocol.PLACEMENT_GATE}]
    spec = {"schedulingGates": gates, **({} if affinity is None else {"affinity": affinity})}
    pod = {"metadata": {"uid": "u"}, "spec": spec}
    after = patched(pod, ungating("u", [gate["name"] for gate in gates], affinity or {}, "n1"))["spec"]
    assert after["schedulingGates"] == gates[:1], "other people's gates stay"
    assert pinned(after) == "n1"
    for key, value in (affinity or {}).items():
        if key != "nodeAffinity":
            assert after["affinity"][key] == value
    before = terms(affinity)
    assert len(terms(after["affinity"])) == max(1, len(before))
    for earlier, now in zip(before, terms(after["affinity"]), strict=False):
        assert set(earlier) <= set(now), "only narrowed"


def test_a_pod_can_be_handed_over_for_any_node() -> None:
    patch = ungating("u", [protocol.PLACEMENT_GATE], {}, "")
    assert [entry["op"] for entry in patch] == ["test", "test", "remove"]


@given(
    st.lists(st.sampled_from([EXISTS, ONLY, {**ONLY, "values": ["n2"]}, {**ONLY, "values": ["n1", "n2"]}]), max_size=3)
)
def test_a_pod_is_pinned_when_all_terms_say_the_same_node(fields: list[dict[str, Any]]) -> None:
    spec = {"affinity": required(*({"matchFields": [field]} for field in fields))}
    names = {field["values"][0] if len(field.get("values", ())) == 1 else "" for field in fields}
    assert pinned(spec) == (names.pop() if len(names) == 1 else "")


def test_a_node_goes_into_every_term() -> None:
    affinity = required({"matchExpressions": [EXISTS]}, {"matchFields": [EXISTS]})
    paths = [entry["path"].rpartition("nodeSelectorTerms")[2] for entry in narrowing(affinity, "n1")]
    assert paths == ["/0/matchFields", "/1/matchFields/-"]


def test_wishes_name_every_label_that_a_level_may_have() -> None:
    labels = {protocol.LABEL_POOL: "p", protocol.LABEL_ROLE: "decode", protocol.LABEL_GROUP: "g"}
    made = wishes(labels, 2, Placement(), preset("topograph"))
    near = made["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    nvlink = [
        term for term in near if term["podAffinityTerm"]["labelSelector"]["matchLabels"] == {protocol.LABEL_GROUP: "g"}
    ]
    assert [term["podAffinityTerm"]["topologyKey"] for term in nvlink] == [
        "accelerator.topograph.run/domain",
        "network.topology.nvidia.com/accelerator",
        "nvidia.com/gpu.clique",
    ]
    alone = wishes(labels, 1, Placement(), preset("hostname"))
    near = alone["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [term["podAffinityTerm"]["topologyKey"] for term in near] == ["kubernetes.io/hostname"]


def test_a_users_own_affinity_stays() -> None:
    own = {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": ["mine"], REQUIRED: ["must"]},
        "nodeAffinity": {"x": 1},
    }
    added = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": ["ours"]}}
    assert with_wishes(own, added) == {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": ["mine", "ours"], REQUIRED: ["must"]},
        "nodeAffinity": {"x": 1},
    }
    assert with_wishes(None, added) == {"podAffinity": added["podAffinity"]}
