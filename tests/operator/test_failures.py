"""A failing pod is explained with its name, its container, the exit code and the engine's last lines."""

from __future__ import annotations

from typing import Any

import pytest

from twinpool.operator.logic.failures import MAX_MESSAGE, failure, first_failure, unplaced
from twinpool.operator.logic.observed import ContainerView, PodView, Termination


def pod(name: str = "p-0", **container: Any) -> PodView:
    fields = {"name": "engine", "image": "img", **container}
    return PodView(name, "decode", containers=(ContainerView(**fields),))


def crash(code: int = 1, reason: str = "Error", message: str = "") -> Termination:
    return Termination(reason, code, message)


@pytest.mark.parametrize(
    ("view", "reason", "words"),
    [
        (pod(waiting_reason="ErrImagePull", waiting_message="denied"), "ImagePullFailed", ["img", "denied", "p-0"]),
        (pod(waiting_reason="ImagePullBackOff"), "ImagePullFailed", ["img", "ImagePullBackOff"]),
        (
            pod(waiting_reason="CreateContainerConfigError", waiting_message='secret "hf" not found'),
            "CreateContainerConfigError",
            ['secret "hf" not found'],
        ),
        (
            pod(waiting_reason="CrashLoopBackOff", restarts=3, last_terminated=crash(3, message="no such model\n")),
            "EngineFailed",
            ["p-0", "engine", "exit code 3", "restarted 3 times", "no such model"],
        ),
        (pod(terminated=crash(1)), "EngineFailed", ["exit code 1", "kubectl logs --previous"]),
        (pod(terminated=crash(137)), "EngineFailed", ["137 (killed"]),
        (pod(terminated=crash(137, "OOMKilled")), "OutOfMemory", ["ran out of memory", "resources.memory"]),
        (pod(last_terminated=crash(1, message="x"), restarts=1), "EngineFailed", ["exit code 1: x"]),
        (pod(name="r", terminated=crash(2)), "EngineFailed", ["pod r"]),
        (
            PodView("p", "decode", containers=(ContainerView("twinpool-inject", "w", terminated=crash(2)),)),
            "ContainerFailed",
            ["twinpool-inject"],
        ),
        (PodView("p", "decode", phase="Failed", reason="Evicted", message="low on disk"), "Evicted", ["low on disk"]),
        (PodView("p", "decode", phase="Failed", reason="Evicted"), "Evicted", ["failed: Evicted"]),
    ],
)
def test_failures(view: PodView, reason: str, words: list[str]) -> None:
    found = failure(view)
    assert found is not None
    assert found.reason == reason
    assert all(word in found.message for word in words), found.message


@pytest.mark.parametrize(
    "view",
    [
        pod(),
        pod(waiting_reason="ContainerCreating"),
        pod(terminated=crash(0, "Completed")),
        pod(ready=True, restarts=1, last_terminated=crash()),
        PodView("p", "decode", phase="Failed"),
        PodView("p", "decode", deadline=1.0, containers=(ContainerView("engine", "i", terminated=crash()),)),
    ],
)
def test_no_failure(view: PodView) -> None:
    assert failure(view) is None


def test_the_first_failure_by_name_speaks_for_all_and_is_bounded() -> None:
    found = first_failure(
        [pod("b", terminated=crash(message="b" * 9000)), pod("a", terminated=crash(message="a" * 9000))]
    )
    assert found is not None
    assert found.message.startswith("1 more pods fail; the first one: pod a")
    assert len(found.message) == MAX_MESSAGE
    assert first_failure([pod()]) is None


def test_the_scheduler_is_quoted() -> None:
    waiting = [
        PodView("b", "decode", scheduled=False),
        PodView("a", "decode", scheduled=False, scheduler_message="0/2 nodes"),
    ]
    found = unplaced(waiting)
    assert found is not None
    assert found.message == "pod a has no node: 0/2 nodes (1 more pods wait)"
    silent = unplaced(waiting[:1])
    assert silent is not None
    assert silent.message.endswith("the scheduler gives no reason")
    assert unplaced([PodView("c", "decode", scheduled=True)]) is None
