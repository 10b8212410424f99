"""Restarts in place: counted once each, on the StatefulSet, over launchers and operators that come and go."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Annotate
from twinpool.operator.logic.groups import Group, groups
from twinpool.operator.logic.observed import Child, Observed, PodView, read_pod
from twinpool.operator.logic.restarts import Life, Note, counting, read_life, restarting, to_ask
from twinpool.worker.logic import report
from twinpool.worker.logic.follower import State as Rank
from twinpool.worker.logic.report import Snapshot
from twinpool.worker.logic.supervisor import RESTART_BUDGET, RESTART_WINDOW, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]

DOWN = PodView(
    "g-0", "decode", "g", phase="Running", uid="u1", address="10.0.0.1", has_served=True, containers_ready=False
)
ONE = Life(epoch=2, restarts=1, recent=1, budget=5, window=600.0, backoff=1.0, reason="engine killed by SIGKILL")


def group(*pods: PodView, note: str = "", retired: bool = False) -> Group:
    marks = {names.RETIRED_ANNOTATION: "true"} if retired else {}
    marks |= {names.RESTARTS_ANNOTATION: note} if note else {}
    content = {"metadata": {"annotations": marks, "labels": {}}, "spec": {"replicas": 1}}
    return Group(Child("StatefulSet", "g", "ug", "7", content), "decode", "r", 1, pods)


def counted(pool: InferencePool, found: Group, **lives: Life) -> Note | None:
    actions = counting(Observed(pool, lives=lives), [found])
    if not actions:
        return None
    (action,) = actions
    assert (action.kind, action.name, action.uid, action.key) == ("StatefulSet", "g", "ug", names.RESTARTS_ANNOTATION)
    assert action.value
    return Note.from_json(action.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"containers_ready": True},
        {"has_served": False},
        {"deadline": 1.0},
        {"address": ""},
        {"phase": "Failed"},
        {"rank": 1},
    ],
)
def test_only_a_leader_is_asked_that_has_served_and_does_not(changes: dict[str, Any]) -> None:
    assert to_ask([group(DOWN)]) == [DOWN]
    assert to_ask([group(dataclasses.replace(DOWN, **changes))]) == []


def test_a_group_that_goes_is_not_asked_and_not_counted(make_pool: Make) -> None:
    assert to_ask([group(DOWN, retired=True), group()]) == []
    assert counted(make_pool(), group(DOWN, retired=True), u1=ONE) is None
    assert counted(make_pool(), group(), u1=ONE) is None


def test_a_pod_has_served_once_its_gate_was_set() -> None:
    gate = {"type": "serving.twinpool.dev/routable", "status": "False"}
    assert read_pod({"metadata": {"name": "g-0"}, "status": {"conditions": [gate]}}).has_served
    assert not read_pod({"metadata": {"name": "g-0"}, "status": {}}).has_served


def test_a_restart_is_noted_with_what_is_left_of_the_budget(make_pool: Make) -> None:
    assert counted(make_pool(), group(DOWN), u1=ONE) == Note("u1", 1, ONE)
    assert counted(make_pool(), group(DOWN), other=ONE) is None
    assert counted(make_pool(), group(DOWN), u1=Life(epoch=1)) is None, "nothing happened yet"


def test_a_restart_is_counted_once_by_whoever_looks(make_pool: Make) -> None:
    noted = group(DOWN, note=Note("u1", 4, ONE).to_json())
    assert counted(make_pool(), noted, u1=ONE) is None
    two = dataclasses.replace(ONE, restarts=3, recent=3)
    assert counted(make_pool(), noted, u1=two) == Note("u1", 6, two), "and what was missed is caught up with"


def test_another_launcher_begins_at_nothing(make_pool: Make) -> None:
    """In another pod, or in the same one when the kubelet has restarted its container."""
    noted = group(DOWN, note=Note("u0", 4, dataclasses.replace(ONE, restarts=4)).to_json())
    assert counted(make_pool(), noted, u1=ONE) == Note("u1", 5, ONE)
    same = group(DOWN, note=Note("u1", 5, dataclasses.replace(ONE, restarts=5)).to_json())
    assert counted(make_pool(), same, u1=ONE) == Note("u1", 6, ONE)
    fresh = Life(epoch=1)
    assert counted(make_pool(), same, u1=fresh) == Note("u1", 5, fresh)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=12),
)
def test_the_note_loses_no_restart_that_a_launcher_still_tells(events: list[tuple[int, bool, bool]]) -> None:
    """Restarts come in bursts; looks happen or not; pods are replaced, and are looked at before they go."""
    note, total, uid, mine = "", 0, 1, 0
    for burst, looked, replaced in events:
        mine += burst
        total += burst
        if looked or replaced:
            pod = dataclasses.replace(DOWN, uid=f"u{uid}")
            life = Life(restarts=mine)
            for _ in range(2):
                for action in counting(Observed(None, lives={pod.uid: life}), [group(pod, note=note)]):  # type: ignore[arg-type]
                    note = action.value or ""
            found = Note.from_json(note)
            assert found is not None
            assert found.total == total
        if replaced:
            uid, mine = uid + 1, 0


@pytest.mark.parametrize("text", ["", "x", "[]", "{}", '{"leader": "u", "total": "many"}', "7"])
def test_what_is_no_note_counts_as_none(text: str, make_pool: Make) -> None:
    assert Note.from_json(text) is None
    assert counted(make_pool(), group(DOWN, note=text), u1=ONE) == Note("u1", 1, ONE)


@pytest.mark.parametrize("answer", [None, [], {}, {"restarts": "1"}, 7])
def test_what_is_no_answer_counts_as_none(answer: Any) -> None:
    assert read_life(answer) is None


def test_a_launchers_own_answer_is_understood() -> None:
    restarted = State(phase="backoff", epoch=3, restarts=(1.0, 2.0), total_restarts=4, reason="engine died")
    said = report.status(Snapshot(restarted, "vllm", "m", "decode", "0.1.0"))
    assert read_life(json.loads(said)) == Life(3, 4, 2, RESTART_BUDGET, RESTART_WINDOW, 2.0, "engine died")
    follower = report.status(Snapshot(Rank(epoch=2), "vllm", "m", "decode", "0.1.0"))
    assert read_life(json.loads(follower)) == Life(2, 1, 0, RESTART_BUDGET, RESTART_WINDOW, 0.0, Rank().reason)


def test_a_launcher_of_an_earlier_version_says_less() -> None:
    found = read_life({"restarts": 2, "epoch": 3, "reason": None, "budget": "5", "window": "x"})
    assert found == Life(epoch=3, restarts=2)
    assert read_life({"restarts": -7, "epoch": -1}) == Life(), "whatever an image answers, counts do not fall"
    assert read_life({"restarts": 1, "window": 600, "reason": "x" * 999}) == Life(
        restarts=1, window=600.0, reason="x" * 300
    )


def test_a_restart_is_said_while_it_lasts() -> None:
    note = Note("u1", 4, dataclasses.replace(ONE, recent=2)).to_json()
    said = "the engine of group g is restarted in place, 2 of 5 times within 10 minutes: engine killed by SIGKILL"
    assert restarting([group(DOWN), group(DOWN, note=note)]) == said
    up = dataclasses.replace(DOWN, containers_ready=True)
    assert restarting([group(up, note=note), group(note=note)]) == ""
    assert restarting([group(dataclasses.replace(DOWN, uid="u2"), note=note)]) == ""
    assert (
        restarting([group(DOWN, note=Note("u1", 1, Life()).to_json())]) == "the engine of group g is restarted in place"
    )


def test_a_restart_shows_in_the_conditions_and_on_the_set_alone(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool())
    cluster.settle()
    (pod,) = [pod for pod in cluster.pods.values() if pod.role == "decode"]
    cluster.pods[pod.name] = dataclasses.replace(pod, has_served=True)
    cluster.set_ready(False, lambda found: found.role == "decode")
    for _ in range(3):
        cluster.lives = {pod.uid: ONE}
        cluster.reconcile()
    said = {item.type: item.message for item in cluster.pool.status.conditions}
    assert "restarted in place, 1 of 5 times within 10 minutes: engine killed by SIGKILL" in said["Ready"]
    assert "restarted in place" in said["Progressing"]
    assert not [action for action in cluster.planned() if isinstance(action, Annotate)]
    cluster.lives = {}
    cluster.set_ready()
    cluster.settle()
    assert "restarted in place" not in {item.type: item.message for item in cluster.pool.status.conditions}["Ready"]
    (found,) = [item for item in groups(cluster.observed()) if item.role == "decode"]
    assert json.loads(found.child.annotation(names.RESTARTS_ANNOTATION) or "")["total"] == 1
