"""Groups: names that are never used again, and which group goes when one must."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Annotate, Apply, Delete, Retire, ScaleToZero, SetGate
from twinpool.operator.logic.groups import LOST_AFTER, groups, last_serial, new_names
from twinpool.operator.logic.observed import Child, Observed, PodView
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.rollout import step
from twinpool.operator.logic.scale_in import Facts, order
from twinpool.operator.logic.settings import Settings
from twinpool.operator.logic.units import state

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]


def group(
    serial: int, *, role: str = "decode", revision: str = "new", ready: bool = True, retired: bool = False
) -> Any:
    annotations = {names.SERIAL_ANNOTATION: str(serial), **({names.RETIRED_ANNOTATION: "true"} if retired else {})}
    labels = {protocol.LABEL_ROLE: role, protocol.LABEL_REVISION: revision}
    content = {"metadata": {"labels": labels, "annotations": annotations, "ownerReferences": []}}
    name = f"g{serial}"
    child = Child("StatefulSet", name, f"u{serial}", "1", content, pods=1)
    return child, PodView(f"{name}-0", role, name, revision, ready=ready)


def existing(make_pool: Make, *members: Any) -> Any:
    return groups(Observed(make_pool(), tuple(child for child, _ in members), tuple(pod for _, pod in members)))


def retired(make_pool: Make, wanted: int, *members: Any) -> tuple[list[str], int]:
    pool, present = make_pool({"decode": {"replicas": wanted}}, prefill=None), existing(make_pool, *members)
    going = order(present, {item.name: Facts(outdated=item.revision != "new") for item in present})
    todo = step(state(pool, going, "new", (), 0.0))
    return list(todo.retire), todo.create["decode"]


def test_scaling_in_takes_groups_that_are_not_ready_first_then_the_newest(make_pool: Make) -> None:
    members = [group(1), group(2, ready=False), group(3)]
    assert retired(make_pool, 2, *members) == (["g2"], 0)
    assert retired(make_pool, 1, *members) == (["g2", "g3"], 0)


def test_scaling_in_takes_outdated_groups_before_newer_ones(make_pool: Make) -> None:
    assert retired(make_pool, 1, group(1, revision="old"), group(2)) == (["g1"], 0)


def test_a_new_revision_starts_with_one_group_more(make_pool: Make) -> None:
    old = [group(n, revision="old") for n in (1, 2, 3)]
    assert retired(make_pool, 3, *old) == ([], 1)


def test_the_next_one_waits_for_the_pods_of_the_last_one_that_went(make_pool: Make) -> None:
    members = [group(1, revision="old", retired=True), group(2, revision="old"), group(3)]
    assert retired(make_pool, 2, *members) == ([], 0)


def test_a_lost_node_holds_nothing_up(make_pool: Make) -> None:
    child, pod = group(1, revision="old", retired=True)
    lost = (child, dataclasses.replace(pod, deadline=-LOST_AFTER - 1))
    assert retired(make_pool, 2, lost, group(2, revision="old"), group(3)) == ([], 1)


def test_what_never_became_ready_goes_at_once(make_pool: Make) -> None:
    members = [group(1, revision="old"), group(2, revision="bad", ready=False)]
    assert retired(make_pool, 1, *members) == (["g2"], 0)


def test_a_serial_that_is_no_number_counts_as_none(make_pool: Make) -> None:
    child, pod = group(1)
    child.content["metadata"]["annotations"][names.SERIAL_ANNOTATION] = "x"
    assert existing(make_pool, (child, pod))[0].serial == 0
    assert last_serial([], "x") == 0
    assert last_serial([], None) == 0
    assert last_serial(existing(make_pool, group(4)), "7") == 7


@given(count=st.integers(0, 50), after=st.integers(0, 1000))
def test_names_are_unique_and_the_same_for_the_same_input(count: int, after: int) -> None:
    made = new_names("uid", "pool", "decode", after, count, ())
    assert made == new_names("uid", "pool", "decode", after, count, ())
    assert len({name for _, name in made}) == count
    assert [serial for serial, _ in made] == list(range(after + 1, after + 1 + count))
    longest = [name for _, name in new_names("uid", "p" * protocol.MAX_POOL_NAME, "prefill", after, 1, ())]
    assert all(len(name) <= 52 for name in longest)


def test_a_taken_name_is_skipped() -> None:
    ((_, first),) = new_names("uid", "pool", "decode", 0, 1, ())
    ((serial, other),) = new_names("uid", "pool", "decode", 0, 1, [first])
    assert serial == 2
    assert other != first


def test_a_group_is_scaled_to_zero_before_it_is_deleted(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool({"decode": {"replicas": 2}}))
    cluster.settle()
    cluster.pool = make_pool()
    first = plan(cluster.observed(), Settings(), cluster.now).actions
    assert [type(action) for action in first] == [Retire]
    cluster.reconcile()
    assert [type(action) for action in cluster.planned()] == [SetGate, Annotate]
    cluster.reconcile()
    assert [type(action) for action in cluster.planned()] == [ScaleToZero]
    cluster.reconcile()
    assert not plan(cluster.observed(), Settings(), cluster.now).actions, "the controller has not seen it yet"
    cluster.run_controllers()
    assert not plan(cluster.observed(), Settings(), cluster.now).actions, "its pod is still there"
    cluster.end_pods()
    assert [type(action) for action in plan(cluster.observed(), Settings(), cluster.now).actions] == [Delete]


def test_a_leaving_pod_is_looked_at_again_when_it_is_overdue(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool({"decode": {"replicas": 2}}))
    cluster.settle()
    assert plan(cluster.observed(), Settings(), cluster.now).requeue_after is None
    cluster.pool = make_pool()
    for _ in range(3):
        cluster.reconcile()
    cluster.run_controllers()
    (leaving,) = [pod for pod in cluster.pods.values() if pod.deadline is not None]
    again = plan(cluster.observed(), Settings(), cluster.now).requeue_after
    assert again == leaving.deadline + LOST_AFTER + 1.0 - cluster.now


def test_a_child_that_is_being_deleted_is_made_anew_only_when_it_is_gone(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool())
    cluster.settle()
    cluster.objects["Role", "demo-router"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not plan(cluster.observed(), Settings(), cluster.now).actions
    del cluster.objects["Role", "demo-router"]
    (action,) = plan(cluster.observed(), Settings(), cluster.now).actions
    assert isinstance(action, Apply)
    assert (action.kind, action.name, action.uid) == ("Role", "demo-router", "")


def test_a_role_that_is_taken_away_loses_its_service_last(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool())
    cluster.settle()
    cluster.pool = make_pool(prefill=None)
    service = ("Service", "demo-prefill")
    first = plan(cluster.observed(), Settings(), cluster.now).actions
    assert service not in {(action.kind, action.name) for action in first if isinstance(action, Delete)}
    cluster.settle()
    assert service not in cluster.objects
    assert {name for kind, name in cluster.objects if kind == "Service"} == {"demo-router", "demo-decode"}
