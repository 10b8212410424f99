"""One decision for all pools: nothing is given twice, what was promised holds, and a torn group is mended in place."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from bench.placement.cases import GPU, node
from twinpool.core import protocol
from twinpool.core.protocol import WORKER_CONFIG_ENV, WorkerConfig
from twinpool.core.topology import PRESETS, topology
from twinpool.operator.logic import names
from twinpool.operator.logic.groups import Group
from twinpool.operator.logic.observed import Child, PodView
from twinpool.operator.logic.placement.growth import affinity_for
from twinpool.operator.logic.placement.ledger import Claim, Ledger, Promise, decide
from twinpool.operator.logic.placement.model import Growth, Holder
from twinpool.operator.logic.placement.reading import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twinpool.core.spec import InferencePool

TOPOLOGY = topology(PRESETS["topograph"])
GATE = (protocol.PLACEMENT_GATE,)
NODES = [node(f"n{n}", "b", f"r{n // 2}", f"c{n // 2}", 8) for n in range(6)]


def group(name: str, pods: list[PodView], size: int, tensor: int, created: float | None = None) -> Group:
    config = WorkerConfig("p", "team", "decode", "", "vllm", "m", "m", tensor=tensor, nodes=size, gpus=8)
    engine = {"env": [{"name": WORKER_CONFIG_ENV, "value": config.to_json()}], "resources": {"limits": {GPU: "8"}}}
    content = {"metadata": {"labels": {}, "annotations": {}}, "spec": {"template": {"spec": {"containers": [engine]}}}}
    child = Child("StatefulSet", name, f"uid-{name}", "1", content, created=created)
    return Group(child, "decode", "r", 1, tuple(pods), size)


def pod(name: str, rank: int = 0, **changes: Any) -> PodView:
    return PodView(f"{name}-{rank}", "decode", name, rank=rank, uid=f"{name}-{rank}", **changes)


def gated(name: str, size: int, first: int = 0) -> list[PodView]:
    return [pod(name, rank, scheduling_gates=GATE) for rank in range(first, size)]


def decided(
    claims: list[Claim], promises: Mapping[str, Promise] | None = None, held: tuple[Held, ...] = (), lost: str = ""
) -> Ledger:
    return decide(claims, promises or {}, [item for item in NODES if item.name != lost], held, TOPOLOGY)


@pytest.fixture
def pool(make_pool: Callable[..., InferencePool]) -> InferencePool:
    return make_pool(prefill=None, placement={})


def test_groups_of_two_pools_get_different_nodes_and_promises(pool: InferencePool) -> None:
    other = pool.model_copy(update={"metadata": pool.metadata.model_copy(update={"name": "other"})})
    claims = [Claim(pool, group("a", gated("a", 2), 2, 16)), Claim(other, group("b", gated("b", 2), 2, 16))]
    ledger = decided(claims)
    first, second = ledger.verdicts["team/a"], ledger.verdicts["team/b"]
    assert first.nodes
    assert second.nodes
    assert not set(first.nodes) & set(second.nodes)
    assert first.pods == {"a-0", "a-1"}
    assert ledger.promises["team/a"] == Promise(first.nodes, first.pods)


def test_what_somebody_else_holds_is_not_given_and_labels_are_complained_about(pool: InferencePool) -> None:
    held = tuple(Held(f"n{n}", f"x{n}", Holder(f"x/y{n}", {GPU: 1})) for n in (0, 3, 4))
    ledger = decided([Claim(pool, group("a", gated("a", 2), 2, 16))], held=held)
    short = ledger.verdicts["team/a"].short
    assert short is not None
    assert short.gang == "team/a"
    assert "held by x/y" in short.message
    assert not ledger.promises
    bare = [*NODES, node("bare", "b", "", None, 8)]
    told = decide([], {}, bare, (), TOPOLOGY).complaints
    assert any("node bare has no label" in text for text in told)


def test_who_was_there_first_is_served_first(pool: InferencePool) -> None:
    held = tuple(Held(f"n{n}", "x", Holder("x/y", {GPU: 8})) for n in range(2, 6))
    young = Claim(pool, group("a", gated("a", 2), 2, 16, created=20.0))
    old = Claim(pool, group("b", gated("b", 2), 2, 16, created=10.0))
    ledger = decided([young, old], held=held)
    assert ledger.verdicts["team/b"].nodes == ("n0", "n1")
    assert ledger.verdicts["team/a"].short


def test_a_group_that_was_handed_over_holds_its_nodes_once(pool: InferencePool) -> None:
    bound = [pod("a", 0, node="n0"), pod("a", 1, pinned="n1")]
    held = (Held("n0", "a-0", Holder("team/a-0", {GPU: 8})), Held("n1", "a-1", Holder("team/a-1", {GPU: 8})))
    ledger = decided([Claim(pool, group("a", bound, 2, 16)), Claim(pool, group("b", gated("b", 2), 2, 16))], held=held)
    assert "team/a" not in ledger.verdicts, "it waits for nothing"
    assert set(ledger.verdicts["team/b"].nodes).isdisjoint({"n0", "n1"})


def test_a_promise_holds_while_any_of_its_pods_lives(pool: InferencePool) -> None:
    promise = Promise(("n4", "n5"), frozenset({"a-0"}))
    some = Claim(pool, group("a", [pod("a", 0, pinned="n4"), *gated("a", 2, first=1)], 2, 16))
    ledger = decided([some], {"team/a": promise})
    assert ledger.verdicts["team/a"].nodes == ("n4", "n5")
    assert ledger.promises["team/a"].pods == {"a-0", "a-1"}
    renewed = [dataclasses.replace(item, uid=f"new-{item.rank}") for item in gated("a", 2)]
    ledger = decided([Claim(pool, group("a", renewed, 2, 16))], {"team/a": promise})
    assert ledger.verdicts["team/a"].nodes == ("n0", "n1"), "new pods get a new decision"
    elsewhere = Claim(pool, group("a", [pod("a", 0, node="n2"), *gated("a", 2, first=1)], 2, 16))
    ledger = decided([elsewhere], {"team/a": promise})
    assert ledger.verdicts["team/a"].nodes == ("n2", "n3")


def test_a_rank_that_was_lost_is_put_beside_its_unit(pool: InferencePool) -> None:
    left = [pod("a", 0, node="n2"), *gated("a", 2, first=1)]
    assert decided([Claim(pool, group("a", left, 2, 16))]).verdicts["team/a"].nodes == ("n2", "n3")
    held = (Held("n3", "x", Holder("x/y", {GPU: 1})),)
    short = decided([Claim(pool, group("a", left, 2, 16))], held=held).verdicts["team/a"].short
    assert short is not None
    assert short.gang == "team/a"
    loose = pool.model_copy(
        update={
            "spec": type(pool.spec).model_validate(
                {**pool.spec.model_dump(), "placement": {"tensor": {"required": False}}}
            )
        }
    )
    assert decided([Claim(loose, group("a", left, 2, 16))], held=held).verdicts["team/a"].nodes[1] != "n3"


def test_ranks_of_several_units_are_mended_unit_by_unit(pool: InferencePool) -> None:
    pods = [pod("a", 0, node="n4"), pod("a", 2, node="n0"), pod("a", 3, node="n1"), *[gated("a", 2)[1]]]
    assert decided([Claim(pool, group("a", pods, 4, 16))]).verdicts["team/a"].nodes == ("n4", "n5", "n0", "n1")


def test_a_node_that_is_gone_tells_nothing(pool: InferencePool) -> None:
    left = [pod("a", 0, node="n2"), *gated("a", 2, first=1)]
    verdict = decided([Claim(pool, group("a", left, 2, 16))], lost="n2").verdicts["team/a"]
    assert verdict.nodes[0] == "n2"
    both = [pod("a", 0, node="n2"), pod("a", 1, node="n3")]
    ledger = decided([Claim(pool, group("a", both, 2, 16)), Claim(pool, group("b", gated("b", 1), 1, 8))], lost="n2")
    assert ledger.verdicts["team/b"].nodes != ("n3",), "the rank that is left still holds its node"


def test_groups_whose_pods_are_not_there_yet_or_go_ask_for_nothing(pool: InferencePool) -> None:
    going = [dataclasses.replace(item, deadline=1.0) for item in gated("a", 2)]
    handed = [pod("c", 0), pod("c", 1)]
    claims = [Claim(pool, group(name, pods, 2, 16)) for name, pods in (("a", going), ("b", []), ("c", handed))]
    assert decided(claims) == Ledger({}, {})


def growing(claim: Claim, noted: str) -> Claim:
    """Return the claim with its pods shown to autoscalers: without gates, as its StatefulSet says."""
    content = dict(claim.group.child.content)
    content["metadata"] = {"labels": {}, "annotations": {names.GROWTH_ANNOTATION: noted}}
    spec = dict(content["spec"]["template"]["spec"])
    spec["affinity"] = affinity_for(None, claim.group.name, Growth.read(noted))
    content["spec"] = {"template": {"spec": spec}}
    pods = tuple(dataclasses.replace(item, scheduling_gates=()) for item in claim.group.pods)
    child = dataclasses.replace(claim.group.child, content=content)
    return Claim(claim.pool, dataclasses.replace(claim.group, child=child, pods=pods))


def test_a_group_that_only_new_nodes_can_hold_is_shown_to_autoscalers_until_they_come(pool: InferencePool) -> None:
    claim = Claim(pool, group("a", gated("a", 3), 3, 24))
    found = decided([claim]).verdicts["team/a"]
    assert found.short is not None
    assert found.growth == Growth("nvidia.com/gpu.clique", tuple(f"n{n}" for n in range(6)))
    shown = growing(claim, str(found.growth))
    assert shown.waits
    assert decided([shown]).verdicts["team/a"].growth == found.growth
    came = [*NODES, node("n6", "b", "r0", "c0", 8)]
    verdict = decide([shown], {}, came, (), TOPOLOGY).verdicts["team/a"]
    assert sorted(verdict.nodes) == ["n0", "n1", "n6"], "nodes that are kept away from count for the decision"
    assert verdict.growth is None


def test_one_pod_is_shown_as_it_is(pool: InferencePool) -> None:
    found = decided([Claim(pool, group("a", gated("a", 1), 1, 16))]).verdicts["team/a"]
    assert found.growth is None
