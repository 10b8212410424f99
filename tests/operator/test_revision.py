"""Revisions: what makes a new one, what does not, and that groups live by the stored one whoever renders."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Apply, Delete
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.observed import Observed, read_child
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.revision import (
    KIND,
    Revision,
    inputs,
    rendered,
    revision_object,
    stored,
    surplus,
    target,
    with_inputs,
)
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]

NEXT_VERSION = Settings("worker:next", "router:next", "vllm:next")
RESTART = {protocol.ANNOTATION_RESTART: "2026-01-01T00:00:00Z"}


def first(pool: InferencePool, settings: Settings | None = None) -> Revision:
    """Return the revision of a new pool."""
    return target(Observed(pool), (), (), settings or Settings())


def then(pool: InferencePool, *known: Revision, settings: Settings | None = None) -> Revision:
    """Return the revision that a pool with stored revisions asks for."""
    children = tuple(read_child(KIND, revision_object(pool, item)) for item in known)
    return target(Observed(pool, children), known, (), settings or Settings())


def restarted(pool: InferencePool, annotations: dict[str, str]) -> InferencePool:
    return pool.model_copy(update={"metadata": pool.metadata.model_copy(update={"annotations": annotations})})


def test_where_spans_go_is_a_new_revision_and_how_many_is_not(make_pool: Make) -> None:
    plain, traced = (make_pool(spec) for spec in ({}, {"tracing": {"endpoint": "http://c:4318"}}))
    assert inputs(plain) == inputs(make_pool({"tracing": None}))
    known = first(traced)
    assert known.name != first(plain).name
    more = make_pool({"tracing": {"endpoint": "http://c:4318", "sampling": 0.5}})
    assert then(more, known).name == known.name
    assert then(plain, known).name != known.name


@given(prefill=st.integers(0, 9), decode=st.integers(0, 9), routers=st.integers(0, 9))
def test_scaling_and_routing_start_no_rollout(make_pool: Make, prefill: int, decode: int, routers: int) -> None:
    changed = {
        "prefill": {"replicas": prefill},
        "decode": {"replicas": decode},
        "routing": {"replicas": routers, "policy": "random"},
        "objectives": {"ttft": "1s"},
        "rollout": {"maxSurge": "25%", "progressDeadline": "2h"},
    }
    known = first(make_pool())
    assert then(make_pool(changed), known) == known
    assert inputs(make_pool(changed)) == known.inputs


@pytest.mark.parametrize(
    "change",
    [
        {"decode": {"startupTimeout": "30m", "parallelism": {"tensor": 1}, "podTemplate": {}, "engine": {"args": []}}},
        {"engine": {"kind": "vllm", "python": "python3", "imagePullSecrets": []}, "handoff": {"connector": "nixl"}},
        {"handoff": {"onPrefillFailure": "fail"}},
        {"model": {"name": "acme/model", "aliases": ["small"]}},
        {"prefill": {"resources": {"gpu": {"perNode": 8}, "shm": "8Gi"}, "scheduling": {"nodeSelector": {}}}},
    ],
)
def test_defaults_that_are_spelled_out_start_no_rollout(make_pool: Make, change: dict[str, Any]) -> None:
    known = first(make_pool())
    assert then(make_pool(change), known) == known


def test_the_order_of_keys_starts_no_rollout(make_pool: Make) -> None:
    labels = {"a": "1", "b": "2", "c": "3"}
    pools = [
        make_pool({"decode": {"podTemplate": {"metadata": {"labels": dict(order)}}}})
        for order in (labels.items(), reversed(labels.items()))
    ]
    assert first(pools[0]).name == first(pools[1]).name
    assert then(pools[1], first(pools[0])) == first(pools[0])


def test_a_field_without_effect_on_pods_starts_no_rollout(make_pool: Make) -> None:
    known = first(make_pool())
    same = make_pool({"model": {"source": "hf://acme/model"}})
    assert inputs(same) != known.inputs
    assert then(same, known) == known


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"name": "acme/other"}},
        {"engine": {"image": "x"}},
        {"decode": {"engine": {"args": ["--x"]}}},
        {"prefill": {"podTemplate": {"spec": {"hostNetwork": True}}}},
        {"decode": {"drainTimeout": "1m"}},
        {"speculation": {"method": "ngram"}},
        {"speculation": {"method": "ngram"}, "decode": {"speculation": {"tokens": 2}}},
        {"decode": {"parallelism": {"data": 2, "expert": True}, "expertBalancing": {"redundantExperts": 2}}},
        {"prefill": {"kvCache": {"tiers": [{"kind": "host", "size": "1Gi"}]}}},
    ],
)
def test_whatever_reaches_a_pod_is_a_new_revision(make_pool: Make, change: dict[str, Any]) -> None:
    known = first(make_pool())
    new = then(make_pool(change), known)
    assert new.name != known.name
    assert (known.number, new.number) == (1, 2)


def test_a_restart_is_a_new_revision_and_in_the_pods(make_pool: Make) -> None:
    known = first(make_pool())
    asked = restarted(make_pool({"decode": {"podTemplate": {"metadata": {"annotations": {"a": "b"}}}}}), RESTART)
    new = then(restarted(make_pool(), RESTART), known)
    assert new.name != known.name
    assert rendered(asked, Settings())["decode"]["metadata"]["annotations"] == {"a": "b", **RESTART}
    assert then(restarted(make_pool(), {protocol.ANNOTATION_RESTART: ""}), known) == known


def test_going_back_finds_the_old_revision_and_makes_it_the_newest(make_pool: Make) -> None:
    old = first(make_pool())
    new = then(make_pool({"engine": {"image": "x"}}), old)
    back = then(make_pool(), old, new)
    assert (back.name, back.number) == (old.name, 3)
    assert back.templates == old.templates


def test_another_version_of_the_operator_starts_no_rollout(make_pool: Make) -> None:
    old = first(make_pool())
    assert then(make_pool(), old, settings=NEXT_VERSION) == old
    same = make_pool({"model": {"source": "hf://acme/model"}})
    assert then(same, old, settings=NEXT_VERSION) == old, "compared by what one renderer makes of both"
    assert then(make_pool({"engine": {"args": ["--x"]}}), old, settings=NEXT_VERSION).name != old.name


def test_another_version_changes_no_group_and_makes_new_ones_like_the_old(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool())
    cluster.settle()
    before = {name: body["spec"] for (kind, name), body in cluster.objects.items() if kind == "StatefulSet"}
    made = plan(cluster.observed(), NEXT_VERSION, cluster.now)
    assert {action.kind for action in made.actions if isinstance(action, Apply)} <= {"Deployment"}
    grown = make_pool({"decode": {"replicas": 2}})
    cluster.pool = grown.model_copy(update={"status": cluster.pool.status})
    cluster.reconcile(NEXT_VERSION)
    sets = {name: body["spec"] for (kind, name), body in cluster.objects.items() if kind == "StatefulSet"}
    assert {name: sets[name] for name in before} == before
    (new,) = [spec for name, spec in sets.items() if name not in before]
    images = [container["image"] for container in new["template"]["spec"]["initContainers"]]
    assert images == [Settings().worker_image]


def test_a_hand_edit_of_an_older_group_is_put_back_by_its_own_revision(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool({"decode": {"replicas": 3}}))
    cluster.settle()
    paused = make_pool({"decode": {"replicas": 3}, "engine": {"image": "x"}, "rollout": {"paused": True}})
    cluster.pool = paused.model_copy(update={"status": cluster.pool.status})
    cluster.reconcile()
    name = next(name for kind, name in cluster.objects if kind == "StatefulSet")
    spec = cluster.objects["StatefulSet", name]["spec"]
    before = copy.deepcopy(spec)
    spec["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    cluster.reconcile()
    assert cluster.objects["StatefulSet", name]["spec"] == before


def test_what_groups_run_is_stored_before_them(make_pool: Make) -> None:
    kinds = [
        action.kind for action in plan(Observed(make_pool()), Settings(), 0.0).actions if isinstance(action, Apply)
    ]
    assert kinds.index(KIND) < kinds.index("StatefulSet")


def test_groups_of_a_version_without_stored_revisions_are_adopted(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool())
    cluster.settle()
    cluster.objects = {key: body for key, body in cluster.objects.items() if key[0] != KIND}
    for (kind, _), body in cluster.objects.items():
        if kind == "StatefulSet":
            body["spec"]["template"]["metadata"]["creationTimestamp"] = None
            body["spec"]["template"]["spec"]["dnsPolicy"] = "ClusterFirst"
    made = plan(cluster.observed(), NEXT_VERSION, cluster.now)
    (kept,) = [action for action in made.actions if isinstance(action, Apply) and action.kind == KIND]
    assert kept.body["metadata"]["labels"][protocol.LABEL_REVISION] == cluster.pool.status.revision
    assert kept.body["data"]["templates"]["decode"]["spec"]["dnsPolicy"] == "ClusterFirst"
    cluster.reconcile(NEXT_VERSION)
    sets = [body["spec"]["template"] for (kind, _), body in cluster.objects.items() if kind == "StatefulSet"]
    assert len(sets) == 2
    assert {item["spec"]["initContainers"][0]["image"] for item in sets} == {Settings().worker_image}


def test_groups_of_another_spec_are_not_adopted(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool())
    cluster.settle()
    cluster.objects = {key: body for key, body in cluster.objects.items() if key[0] != KIND}
    observed = cluster.observed()
    edited = make_pool({"engine": {"image": "x"}})
    metadata = edited.metadata.model_copy(update={"generation": 2})
    pool = edited.model_copy(update={"metadata": metadata, "status": cluster.pool.status})
    found = target(Observed(pool, observed.children), (), groups(observed), Settings())
    assert found.name == first(pool).name


def test_the_history_is_kept_to_its_limit(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool(rollout={"revisionHistoryLimit": 1}))
    cluster.settle()
    for image in ("a", "b", "c"):
        spec = make_pool({"engine": {"image": image}}, rollout={"revisionHistoryLimit": 1})
        cluster.pool = spec.model_copy(update={"status": cluster.pool.status})
        cluster.settle()
    kept = stored(cluster.observed())
    assert [item.inputs["engine"]["image"] for item in kept] == ["b", "c"]


def test_what_is_in_use_is_kept_beyond_the_limit(make_pool: Make, model_cluster: Any) -> None:
    old, new = first(make_pool()), Revision("new", 2, {}, {})
    cluster = model_cluster(make_pool())
    cluster.settle()
    assert surplus((old, new), "new", groups(cluster.observed()), 0) == set()
    assert surplus((old, new), "new", (), 0) == {old.name}


def test_a_deleted_revision_that_is_in_use_comes_back_as_it_was(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool())
    cluster.settle()
    (key,) = [key for key in cluster.objects if key[0] == KIND]
    before = cluster.objects.pop(key)["data"]
    actions = plan(cluster.observed(), Settings(), cluster.now).actions
    assert [(type(action), action.kind) for action in actions if not isinstance(action, Delete)] == [(Apply, KIND)]
    cluster.settle()
    assert cluster.objects[key]["data"] == before


def test_a_revision_in_another_shape_is_passed_over_and_its_name_not_taken(make_pool: Make) -> None:
    pool = make_pool()
    taken = revision_object(pool, first(pool))
    taken["data"] = {"other": 1}
    observed = Observed(pool, (read_child(KIND, taken),))
    assert stored(observed) == ()
    assert target(observed, (), (), Settings()).name != first(pool).name


def test_inputs_of_another_version_are_passed_over(make_pool: Make) -> None:
    strange = Revision("strange", 1, {"model": {}, "decode": {}}, {})
    assert then(make_pool(), strange).number == 2


@given(st.booleans(), st.booleans(), st.integers(0, 5))
def test_a_pool_with_the_inputs_of_another_has_its_inputs(
    make_pool: Make, restart: bool, aggregated: bool, replicas: int
) -> None:
    other = make_pool({"engine": {"image": "x"}, "decode": {"replicas": 9}})
    if aggregated:
        other = make_pool({"engine": {"image": "x"}}, prefill=None)
    if restart:
        other = restarted(other, RESTART)
    pool = make_pool({"decode": {"replicas": replicas}, "routing": {"replicas": 3}})
    back = with_inputs(pool, inputs(other))
    assert inputs(back) == inputs(other)
    assert back.spec.decode.replicas == replicas
    assert back.spec.routing == pool.spec.routing
    assert names.roles(back).keys() == names.roles(other).keys()
