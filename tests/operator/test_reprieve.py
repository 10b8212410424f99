"""Groups that were let go stay for a window without work: missed, they come back at once; otherwise they end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from twinpool.operator.logic import names
from twinpool.operator.logic.actions import PutBack, Retire, ScaleToZero
from twinpool.operator.logic.groups import groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

OBJECTIVES = {"ttft": "2s", "itl": "50ms"}
BOUNDS = {"min": 0, "max": 8}
#: Longer than what is between two rounds of the model.
WINDOW = 600.0


class Pool:
    """A pool of the model whose target is set by hand."""

    def __init__(self, make_pool: Callable[..., InferencePool], model_cluster: Any, **scaling: Any) -> None:
        self._make_pool = make_pool
        self.spec: dict[str, Any] = {
            "objectives": OBJECTIVES,
            "scaling": {"prefill": BOUNDS, "decode": BOUNDS, "window": f"{WINDOW:g}s", **scaling},
        }
        self.cluster = model_cluster(make_pool(self.spec))

    def aim(self, prefill: int, decode: int) -> None:
        pool = self._make_pool(self.spec)
        target = {"target": {"prefill": prefill, "decode": decode}, "time": "1970-01-01T00:00:00Z"}
        body = {"metadata": pool.metadata, "spec": pool.spec, "status": {"scaling": target}}
        self.cluster.pool = type(pool).model_validate(body)

    def rounds(self, count: int) -> list[Any]:
        """Let ``count`` seconds pass with a reconciliation in each, and return all that was done."""
        done = []
        for _ in range(count):
            done += self.cluster.planned()
            self.cluster.reconcile()
            self.cluster.run_controllers()
            self.cluster.end_pods()
            self.cluster.set_ready()
            self.cluster.now += 1.0
        return done

    def live(self) -> dict[str, int]:
        found = [group.role for group in groups(self.cluster.observed()) if not group.retired]
        return {role: found.count(role) for role in ("prefill", "decode")}

    def pods(self) -> int:
        return sum(bool(pod.group) for pod in self.cluster.pods.values())


@pytest.fixture
def pool(make_pool: Callable[..., InferencePool], model_cluster: Any) -> Pool:
    found = Pool(make_pool, model_cluster)
    found.aim(2, 3)
    found.cluster.settle()
    return found


def test_a_group_that_is_let_go_keeps_its_pods_for_a_window_and_then_ends(pool: Pool) -> None:
    pool.aim(2, 1)
    (first, second) = [action for action in pool.cluster.planned() if isinstance(action, Retire)]
    assert first.kept == second.kept
    done = pool.rounds(60)
    assert not [action for action in done if isinstance(action, ScaleToZero)]
    marked = [pod for pod in pool.cluster.pods.values() if pod.draining]
    assert len(marked) == 2, "routers send them nothing"
    assert pool.pods() == 5, "what they hold is kept"
    pool.cluster.now += WINDOW
    done = pool.rounds(5)
    assert len([action for action in done if isinstance(action, ScaleToZero)]) == 2
    assert pool.pods() == 3


def test_a_group_that_is_wanted_again_comes_back_without_a_start(pool: Pool) -> None:
    made = list(pool.cluster.created_groups)
    pool.aim(2, 1)
    pool.rounds(20)
    pool.aim(2, 2)
    done = pool.rounds(5)
    (back,) = [action for action in done if isinstance(action, PutBack)]
    assert pool.cluster.created_groups == made, "no new group is made"
    assert pool.live() == {"prefill": 2, "decode": 2}
    found = pool.cluster.sets()[back.name]
    assert found.annotation(names.RETIRED_ANNOTATION) is None
    assert found.annotation(names.KEPT_ANNOTATION) is None
    assert not any(pod.draining for pod in pool.cluster.pods.values() if pod.group == back.name)
    pool.aim(2, 3)
    pool.rounds(5)
    assert pool.cluster.created_groups == made
    assert pool.cluster.planned() == ()


def test_a_group_whose_pods_are_gone_does_not_come_back(pool: Pool) -> None:
    made = len(pool.cluster.created_groups)
    pool.aim(2, 1)
    pool.rounds(5)
    pool.cluster.set_ready(False, lambda pod: pod.draining)
    pool.aim(2, 3)
    assert not [action for action in pool.cluster.planned() if isinstance(action, PutBack)]
    pool.cluster.settle()
    assert len(pool.cluster.created_groups) == made + 2
    assert pool.live() == {"prefill": 2, "decode": 3}


def test_what_the_budget_needs_for_others_is_given_up_at_once(
    make_pool: Callable[..., InferencePool], model_cluster: Any
) -> None:
    found = Pool(make_pool, model_cluster, gpuBudget=5)
    found.aim(1, 3)
    found.cluster.settle()
    found.aim(1, 2)
    assert not [action for action in found.rounds(20) if isinstance(action, ScaleToZero)]
    found.aim(2, 2)
    assert not [action for action in found.rounds(20) if isinstance(action, ScaleToZero)], "5 of 5"
    found.aim(3, 2)
    done = found.rounds(10)
    assert len([action for action in done if isinstance(action, ScaleToZero)]) == 1
    assert found.live() == {"prefill": 3, "decode": 2}


def test_a_new_revision_and_a_pool_without_scaling_keep_nothing(pool: Pool) -> None:
    pool.aim(2, 1)
    pool.rounds(5)
    pool.spec["engine"] = {"args": ["--seed=1"]}
    pool.aim(2, 1)
    assert [action for action in pool.rounds(5) if isinstance(action, ScaleToZero)]
    pool.cluster.settle()
    del pool.spec["scaling"]
    pool.spec |= {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}
    pool.aim(1, 1)
    retired = [action for action in pool.cluster.planned() if isinstance(action, Retire)]
    assert [action.kept for action in retired] == [None]
    pool.rounds(10)
    assert pool.live() == {"prefill": 1, "decode": 1}
