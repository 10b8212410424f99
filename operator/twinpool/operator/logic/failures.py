"""Why a pod does not run, in words a user can act on: pod, container, exit code, and the engine's last lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.core import protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.operator.logic.observed import ContainerView, PodView, Termination

#: Longest message of a condition that we write; an engine's last lines are at most 4096 bytes.
MAX_MESSAGE = 6000

_PULLING = {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"}
_STARTING = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
_KILLED = 137


@dataclass(frozen=True, slots=True)
class Failure:
    """What is wrong with one pod."""

    reason: str
    message: str


def failure(pod: PodView) -> Failure | None:
    """Return what is wrong with a pod that nobody asked to go, or None."""
    if pod.deadline is not None:
        return None
    if pod.phase == "Failed" and pod.reason:
        return Failure(pod.reason, f"pod {pod.name} failed: {pod.message or pod.reason}")
    for container in pod.containers:
        found = _container_failure(pod.name, container)
        if found:
            return found
    return None


def _container_failure(pod: str, container: ContainerView) -> Failure | None:
    where = f"pod {pod}, container {container.name}"
    if container.waiting_reason in _PULLING:
        cause = container.waiting_message or container.waiting_reason
        return Failure("ImagePullFailed", f"{where}: image {container.image} cannot be pulled: {cause}")
    if container.waiting_reason in _STARTING:
        return Failure(container.waiting_reason, f"{where} cannot be started: {container.waiting_message}")
    ended = container.terminated or container.last_terminated
    if ended is None or ended.exit_code == 0 or container.ready:
        return None
    return Failure(_ended_reason(container.name, ended), f"{where} {_ended_words(container, ended)}")


def _ended_reason(container: str, ended: Termination) -> str:
    if ended.reason == "OOMKilled":
        return "OutOfMemory"
    return "EngineFailed" if container == protocol.ENGINE_CONTAINER else "ContainerFailed"


def _ended_words(container: ContainerView, ended: Termination) -> str:
    how = f"ended with exit code {ended.exit_code}"
    if ended.reason == "OOMKilled":
        how += ": it ran out of memory; raise resources.memory or lower what the engine uses"
    elif ended.exit_code == _KILLED:
        how += " (killed, which is often a lack of memory)"
    times = f", restarted {container.restarts} times" if container.restarts > 1 else ""
    text = ended.message.strip()
    return f"{how}{times}: {text}" if text else f"{how}{times}; kubectl logs --previous shows more"


def first_failure(pods: Iterable[PodView]) -> Failure | None:
    """Return the failure of the first failing pod by name, with the number of others that fail."""
    found = [item for item in (failure(pod) for pod in sorted(pods, key=lambda pod: pod.name)) if item]
    if not found:
        return None
    others = f"{len(found) - 1} more pods fail; the first one: " if len(found) > 1 else ""
    return Failure(found[0].reason, (others + found[0].message)[:MAX_MESSAGE])


def unplaced(pods: Iterable[PodView]) -> Failure | None:
    """Return the scheduler's reason for the first pod that has no node, or None when every pod has one."""
    waiting = sorted((pod for pod in pods if pod.scheduled is False), key=lambda pod: pod.name)
    if not waiting:
        return None
    others = f" ({len(waiting) - 1} more pods wait)" if len(waiting) > 1 else ""
    said = waiting[0].scheduler_message or "the scheduler gives no reason"
    return Failure("Unschedulable", f"pod {waiting[0].name} has no node: {said}{others}"[:MAX_MESSAGE])
