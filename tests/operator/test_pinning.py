"""From a decision about nodes to pods that are handed over, or taken back when kube-scheduler says no."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Apply, HandOver, TakeBack
from twinpool.operator.logic.groups import Group
from twinpool.operator.logic.observed import Child, Observed, PodView, read_pod
from twinpool.operator.logic.pinning import (
    HALF_AFTER,
    RACE_AFTER,
    coming,
    ends,
    growing,
    handed_over,
    remade,
    taken_back,
    undecided,
)
from twinpool.operator.logic.placement.model import Growth, Shortfall, Verdict
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

GATE = (protocol.PLACEMENT_GATE,)
SEES = Settings(sees_nodes=True)
NOW = 1000.0
SHORT = Shortfall("team/a", "TopologyUnmet", "too few", "add some")
VAIN = dataclasses.replace(SHORT, in_vain=True)


def group(*pods: PodView, size: int = 2, placement: str = "pin", **annotations: str) -> Group:
    notes = {names.PLACEMENT_ANNOTATION: placement, **annotations}
    content = {"metadata": {"labels": {}, "annotations": notes}, "spec": {"replicas": size}}
    return Group(Child("StatefulSet", "a", "uid-a", "1", content), "decode", "r", 1, pods, size)


def pod(rank: int, **changes: Any) -> PodView:
    return PodView(f"a-{rank}", "decode", "a", rank=rank, uid=f"u{rank}", created=NOW, **changes)


def gated(rank: int, **changes: Any) -> PodView:
    return pod(rank, scheduling_gates=GATE, affinity={}, **changes)


def seen(pool: InferencePool, verdict: Verdict | None = None) -> Observed:
    return Observed(pool, verdicts={} if verdict is None else {"a": verdict})


@pytest.fixture
def pool(make_pool: Callable[..., InferencePool]) -> InferencePool:
    return make_pool(placement={})


BOTH = frozenset({"u0", "u1"})


@pytest.mark.parametrize(
    ("verdict", "size", "expected"),
    [
        (None, 2, []),
        (Verdict(("n1", "n2"), pods=BOTH), 2, ["n1", "n2"]),
        (Verdict(("n1", "n2"), pods=frozenset({"u1"})), 2, ["n2"]),
        (Verdict(short=SHORT, pods=BOTH), 2, []),
        (Verdict(short=VAIN, pods=BOTH), 2, []),
        (Verdict(short=VAIN, pods=BOTH), 1, ["", ""]),
    ],
)
def test_pods_are_handed_over_to_their_nodes(
    pool: InferencePool, verdict: Verdict | None, size: int, expected: list[str]
) -> None:
    found = handed_over(seen(pool, verdict), [group(gated(0), gated(1), size=size)], SEES)
    assert [action.node for action in found] == expected
    assert all(action.patch[0]["value"] == action.uid for action in found)


def test_pods_that_go_or_are_not_gated_by_us_are_left_alone(pool: InferencePool) -> None:
    pods = [gated(0, deadline=NOW), pod(1, scheduling_gates=("other/gate",), affinity={})]
    assert handed_over(seen(pool, Verdict(("n1", "n2"), pods=BOTH)), [group(*pods)], SEES) == []


def test_without_a_view_of_the_nodes_nobody_waits(pool: InferencePool) -> None:
    found = handed_over(seen(pool), [group(gated(0), gated(1))], Settings())
    assert [action.node for action in found] == ["", ""]


def lost(rank: int, **changes: Any) -> PodView:
    return pod(rank, pinned=f"n{rank}", unschedulable=True, scheduled=False, scheduler_message="0/3 nodes", **changes)


def test_a_lost_race_takes_the_whole_group_back_in_time(pool: InferencePool) -> None:
    groups = [group(lost(0), pod(1, node="n1", pinned="n1"))]
    assert taken_back(seen(pool), groups, NOW + RACE_AFTER - 1) == []
    found = taken_back(seen(pool), groups, NOW + RACE_AFTER)
    assert [action.uid for action in found] == ["u0", "u1"]
    assert found[0].reason == "kube-scheduler did not bind a-0 to n0: 0/3 nodes"
    assert ends(seen(pool), groups) == [NOW + RACE_AFTER]


@pytest.mark.parametrize(("age", "patience"), [(0.0, 10.0), (100.0, 25.0), (86400.0, 60.0)])
def test_what_is_refused_for_good_is_tried_ever_more_rarely(pool: InferencePool, age: float, patience: float) -> None:
    tried = group(lost(0), size=1)
    tried = dataclasses.replace(tried, child=dataclasses.replace(tried.child, created=NOW - age))
    assert ends(seen(pool), [tried]) == [NOW + patience]
    assert taken_back(seen(pool), [tried], NOW + patience - 1) == []
    assert len(taken_back(seen(pool), [tried], NOW + patience)) == 1


def test_a_pod_without_a_time_has_just_been_made(pool: InferencePool) -> None:
    assert taken_back(seen(pool), [group(dataclasses.replace(lost(0), created=None))], NOW) == []


def test_a_group_that_serves_loses_only_the_pod_that_lost(pool: InferencePool) -> None:
    groups = [group(lost(0), pod(1, node="n1", containers_ready=True))]
    assert [action.uid for action in taken_back(seen(pool), groups, NOW + RACE_AFTER)] == ["u0"]


def test_gated_pods_have_lost_nothing(pool: InferencePool) -> None:
    groups = [group(lost(0), gated(1))]
    assert [action.uid for action in taken_back(seen(pool), groups, NOW + RACE_AFTER)] == ["u0"]


@pytest.mark.parametrize(
    "changed",
    [group(lost(0), placement="affinity"), group(lost(0), **{names.RETIRED_ANNOTATION: "true"}), group(size=0)],
)
def test_groups_that_are_not_ours_to_place_are_left_alone(pool: InferencePool, changed: Group) -> None:
    assert taken_back(seen(pool), [changed], NOW + 1000) == []
    assert ends(seen(pool), [changed]) == []


def test_half_a_group_holds_its_nodes_for_a_while_only(pool: InferencePool) -> None:
    observed = seen(pool, Verdict(short=SHORT, pods=BOTH))
    groups = [group(pod(0, node="n0"), gated(1))]
    assert taken_back(observed, groups, NOW + HALF_AFTER - 1) == []
    assert [action.uid for action in taken_back(observed, groups, NOW + HALF_AFTER)] == ["u0"]
    assert ends(observed, groups) == [NOW + HALF_AFTER]
    assert taken_back(observed, [group(gated(0), gated(1))], NOW + HALF_AFTER) == [], "it holds nothing"


GROWTH = Growth("clique", ("n0",))
NEW = Verdict(short=VAIN, pods=BOTH, growth=GROWTH)


def shown(rank: int, **changes: Any) -> PodView:
    """A pod that kube-scheduler refuses, for autoscalers to see."""
    return pod(rank, scheduled=False, unschedulable=True, **changes)


@pytest.mark.parametrize(
    ("changed", "verdict", "settings", "expected"),
    [
        (group(gated(0), gated(1)), NEW, SEES, "clique n0"),
        (group(gated(0), gated(1)), Verdict(short=SHORT, pods=BOTH), SEES, ""),
        (group(gated(0), gated(1)), None, SEES, ""),
        (group(gated(0), gated(1)), NEW, Settings(), ""),
        (group(shown(0), shown(1), **{names.GROWTH_ANNOTATION: "clique n9"}), NEW, SEES, "clique n9"),
        (group(shown(0), shown(1), **{names.GROWTH_ANNOTATION: "rack n9"}), NEW, SEES, "clique n0"),
        (group(shown(0), shown(1), **{names.GROWTH_ANNOTATION: "clique n9"}), None, SEES, "clique n9"),
        (group(**{names.GROWTH_ANNOTATION: "clique n9"}), None, SEES, "clique n9"),
        (group(pod(0, node="a"), shown(1), **{names.GROWTH_ANNOTATION: "clique n9"}), NEW, SEES, "clique n9"),
        (group(pod(0, node="a"), pod(1, node="b"), **{names.GROWTH_ANNOTATION: "clique n9"}), None, SEES, ""),
    ],
)
def test_when_a_group_is_shown_to_autoscalers(
    changed: Group, verdict: Verdict | None, settings: Settings, expected: str
) -> None:
    assert growing(changed, verdict, settings) == expected


def test_pods_are_made_anew_once_their_set_says_so(pool: InferencePool) -> None:
    noted = {names.GROWTH_ANNOTATION: "clique n0"}
    waits = group(gated(0), gated(1))
    assert remade(seen(pool, NEW), [waits], SEES) == [], "its StatefulSet is about to change"
    found = remade(seen(pool, NEW), [group(gated(0), gated(1), **noted)], SEES)
    assert [action.uid for action in found] == ["u0", "u1"]
    assert found[0].reason == "a-0 is made anew: only new nodes can hold its group"
    assert remade(seen(pool, NEW), [group(shown(0), pod(1, node="x"), **noted)], SEES) == []
    came = seen(pool, Verdict(("n1", "n2"), pods=BOTH))
    assert remade(came, [group(shown(0), shown(1), **noted)], SEES) == []
    (back,) = remade(came, [group(shown(0), pod(1, node="n2"), pod(2, pinned="n3"), size=3)], SEES)
    assert (back.uid, back.reason) == ("u0", "a-0 is made anew: nodes can be chosen for its group now")
    assert remade(came, [group(shown(0), size=1)], SEES) == [], "one pod is shown as it is"
    assert remade(came, [group(shown(0), shown(1))], Settings()) == []


def test_half_a_group_that_grows_holds_its_nodes_for_a_while_only(pool: InferencePool) -> None:
    observed, noted = seen(pool, NEW), {names.GROWTH_ANNOTATION: "clique n0"}
    half = [group(pod(0, node="n5"), shown(1), **noted)]
    assert taken_back(observed, half, NOW + HALF_AFTER - 1) == []
    assert [action.uid for action in taken_back(observed, half, NOW + HALF_AFTER)] == ["u0", "u1"]
    assert taken_back(observed, [group(shown(0), shown(1), **noted)], NOW + HALF_AFTER) == [], "it holds nothing"
    assert undecided(seen(pool), half)


def test_new_pods_under_old_names_are_undecided(pool: InferencePool) -> None:
    verdict = Verdict(("n1", "n2"), pods=BOTH)
    assert undecided(seen(pool), [group(gated(0))])
    assert not undecided(seen(pool, verdict), [group(gated(0), gated(1), pod(2))])
    assert undecided(seen(pool, verdict), [group(gated(0, draining=True), dataclasses.replace(gated(1), uid="new"))])
    assert not undecided(seen(pool), [group(gated(0), placement="affinity")])


def sets(pool: InferencePool, settings: Settings) -> dict[str, dict[str, Any]]:
    made = plan(Observed(pool), settings, NOW)
    return {
        action.body["metadata"]["labels"][protocol.LABEL_ROLE]: dict(action.body)
        for action in made.actions
        if isinstance(action, Apply) and action.kind == "StatefulSet"
    }


@pytest.mark.parametrize(
    ("changes", "settings", "mode"),
    [
        ({"placement": {}}, SEES, "pin"),
        ({"placement": {"mode": "affinity"}}, SEES, "affinity"),
        ({"placement": {}}, Settings(), "affinity"),
        ({}, SEES, None),
        ({"placement": {}, "decode": {"scheduling": {"schedulerName": "mine"}}}, SEES, "affinity"),
        ({"placement": {}, "decode": {"podTemplate": {"spec": {"resourceClaims": [{"name": "x"}]}}}}, SEES, "affinity"),
    ],
)
def test_how_new_groups_get_their_nodes(
    make_pool: Callable[..., InferencePool], changes: dict[str, Any], settings: Settings, mode: str | None
) -> None:
    pool = make_pool(changes)
    body = sets(pool, settings)["decode"]
    spec = body["spec"]["template"]["spec"]
    assert body["metadata"]["annotations"].get(names.PLACEMENT_ANNOTATION) == mode
    assert spec.get("schedulingGates") == ([{"name": protocol.PLACEMENT_GATE}] if mode == "pin" else None)
    assert ("affinity" in spec) == (mode == "affinity")
    assert plan(Observed(pool), settings, NOW).status.get("placement") == mode


@pytest.mark.parametrize("settings", [SEES, Settings()])
def test_an_edit_leaves_groups_that_are_there_as_they_are(
    model_cluster: Any, pool: InferencePool, settings: Settings
) -> None:
    cluster = model_cluster(pool)
    cluster.reconcile(settings)
    cluster.run_controllers()
    before = {name: child.content for name, child in cluster.sets().items()}
    cluster.pool = pool.model_copy(update={"spec": pool.spec.model_copy(update={"placement": None})})
    cluster.reconcile(SEES)
    assert {name: child.content for name, child in cluster.sets().items()} == before
    revisions = {child.name for child in cluster.observed().children if child.kind == "ControllerRevision"}
    assert len(revisions) == 1, "where pods go is not what they are made of"


def test_a_group_without_nodes_says_why(model_cluster: Any, pool: InferencePool) -> None:
    cluster = model_cluster(pool)
    cluster.reconcile(SEES)
    cluster.run_controllers()
    groups = list(cluster.sets())
    cluster.pods = {
        name: dataclasses.replace(item, scheduled=None, scheduling_gates=GATE, affinity={}, created=NOW)
        if item.group
        else item
        for name, item in cluster.pods.items()
    }
    uids = frozenset(item.uid for item in cluster.pods.values())
    verdicts = {name: Verdict(short=dataclasses.replace(SHORT, gang=f"team/{name}"), pods=uids) for name in groups}
    observed = dataclasses.replace(cluster.observed(), verdicts=verdicts)
    status = plan(observed, SEES, NOW).status
    (placed,) = [item for item in status["conditions"] if item["type"] == "Placed"]
    assert (placed["status"], placed["reason"]) == ("False", "TopologyUnmet")
    assert placed["message"].endswith("too few - add some (1 more groups wait)")
    assert placed["message"].startswith("group demo-")
    one = dataclasses.replace(observed, verdicts={groups[0]: verdicts[groups[0]]})
    (placed,) = [item for item in plan(one, SEES, NOW).status["conditions"] if item["type"] == "Placed"]
    assert placed["message"].endswith("too few - add some")


def test_decisions_become_actions_and_times(model_cluster: Any, pool: InferencePool) -> None:
    cluster = model_cluster(pool)
    cluster.reconcile(SEES)
    cluster.run_controllers()
    first, second = sorted(name for name, item in cluster.pods.items() if item.group)
    cluster.pods[first] = dataclasses.replace(
        cluster.pods[first], scheduled=False, unschedulable=True, pinned="n9", created=NOW
    )
    cluster.pods[second] = dataclasses.replace(cluster.pods[second], scheduling_gates=GATE, affinity={})
    name, uid = cluster.pods[second].group, cluster.pods[second].uid
    observed = dataclasses.replace(cluster.observed(), verdicts={name: Verdict(("n1",), pods=frozenset({uid}))})
    made = plan(observed, SEES, NOW)
    assert [action.node for action in made.actions if isinstance(action, HandOver)] == ["n1"]
    assert made.requeue_after == pytest.approx(RACE_AFTER + 1)
    later = plan(observed, SEES, NOW + RACE_AFTER)
    assert [action.name for action in later.actions if isinstance(action, TakeBack)] == [first]
    assert {action.kind for action in later.actions if isinstance(action, HandOver | TakeBack)} == {"Pod"}


def test_what_is_read_of_a_pod() -> None:
    only = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [only]}}}
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"}
    body: dict[str, Any] = {
        "metadata": {"name": "x", "creationTimestamp": "1970-01-01T00:16:40Z"},
        "spec": {"affinity": affinity},
        "status": {"conditions": [unschedulable]},
    }
    found = read_pod(body)
    assert (found.pinned, found.created, found.unschedulable, found.affinity) == ("n2", NOW, True, None)
    assert found.scheduled is False
    preempting = read_pod({**body, "status": {"conditions": [unschedulable], "nominatedNodeName": "n2"}})
    assert not preempting.unschedulable
    waiting = read_pod({**body, "spec": {"affinity": affinity, "schedulingGates": [{"name": GATE[0]}]}})
    assert (waiting.scheduling_gates, waiting.affinity, waiting.pinned, waiting.scheduled) == (GATE, affinity, "", None)


def test_a_gate_that_was_just_removed_is_no_refusal() -> None:
    """kube-scheduler's word on gates stays on a pod for a moment after the last of them is gone."""
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "SchedulingGated",
        "message": "Scheduling is blocked due to non-empty scheduling gates",
    }
    found = read_pod({"metadata": {"name": "x"}, "status": {"conditions": [condition]}})
    assert (found.scheduled, found.scheduler_message, found.unschedulable) == (None, "", False)


def test_more_is_coming_while_groups_or_pods_are_missing(make_pool: Callable[..., InferencePool]) -> None:
    one = make_pool(placement={}, prefill=None)
    assert not coming(seen(one), [group(gated(0), gated(1))])
    assert coming(seen(one), [group(gated(0))]), "a pod is not there yet"
    assert coming(seen(one), []), "a group is not there yet"
    gone = {names.RETIRED_ANNOTATION: "true"}
    assert coming(seen(one), [group(gated(0), gated(1), **gone)]), "one that goes stands for none that comes"
    assert not coming(seen(one), [group(pod(0), placement="affinity")]), "its pods are not ours to place"
