"""Serving groups: which exist, how they are, and what new ones are called.

A group is one model replica: one StatefulSet that is created and deleted whole, under a name that is never used
again (a lost node's pods keep their names until the node is back). A group goes by being *retired* first: marked and
scaled to 0, then deleted when its last pod is gone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.pods import nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.operator.logic.observed import Child, Observed, PodView

#: Seconds after the end of a pod's grace period when its node is taken for lost.
LOST_AFTER = 30.0

_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_SUFFIX = 6


@dataclass(frozen=True, slots=True)
class Group:
    """One serving group as it is."""

    child: Child
    role: str
    revision: str
    serial: int
    #: Pods that exist, whatever their state.
    pods: tuple[PodView, ...]
    #: Pods that make it whole, one for each node.
    size: int = 1
    #: Whether it was let go and comes back.
    returning: bool = False

    @property
    def name(self) -> str:
        """Return the group's name, which is its StatefulSet's."""
        return self.child.name

    @property
    def retired(self) -> bool:
        """Return whether the group is on its way out."""
        marked = self.child.annotation(names.RETIRED_ANNOTATION) == "true" and not self.returning
        return self.child.deleting or marked

    @property
    def grows(self) -> str:
        """Return how its pods are shown to autoscalers because only new nodes can hold it; empty otherwise."""
        return self.child.annotation(names.GROWTH_ANNOTATION) or ""

    @property
    def replicas(self) -> int:
        """Return how many pods the group's StatefulSet is asked for."""
        count: int = self.child.content.get("spec", {}).get("replicas", 1)
        return count

    @property
    def leader(self) -> PodView | None:
        """Return the pod that answers for the group."""
        return next((pod for pod in self.pods if pod.rank == 0), None)

    @property
    def ready(self) -> bool:
        """Return whether the group serves: every pod of it is ready and stays."""
        serving = [pod for pod in self.pods if pod.ready and pod.deadline is None]
        return not self.retired and len(serving) >= self.size

    @property
    def loaded(self) -> bool:
        """Return whether the engines of all its pods are ready, whether or not routers list the group yet."""
        running = [pod for pod in self.pods if (pod.containers_ready or pod.ready) and pod.deadline is None]
        return not self.retired and len(running) >= self.size

    @property
    def gone(self) -> bool:
        """Return whether a group that was scaled to 0 has no pod left, as its controller says too."""
        return self.child.seen and self.replicas == 0 and self.child.pods == 0 and not self.pods

    def lost(self, now: float) -> bool:
        """Return whether all that is left of the group is pods that a lost node holds."""
        return bool(self.pods) and all(_overdue(pod, now) for pod in self.pods)

    def torn(self, now: float) -> bool:
        """Return whether a lost node holds a pod of the group: its name is taken, so nothing can replace it."""
        return any(_overdue(pod, now) for pod in self.pods)


def _overdue(pod: PodView, now: float) -> bool:
    return pod.deadline is not None and now > pod.deadline + LOST_AFTER


def groups(observed: Observed) -> tuple[Group, ...]:
    """Return the groups that exist, by serial."""
    pods: dict[str, list[PodView]] = {}
    for pod in observed.pods:
        pods.setdefault(pod.group, []).append(pod)
    found = [_group(child, pods) for child in observed.children if child.kind == "StatefulSet"]
    return tuple(sorted(found, key=lambda group: (group.serial, group.name)))


def _group(child: Child, pods: Mapping[str, list[PodView]]) -> Group:
    serial = child.annotation(names.SERIAL_ANNOTATION) or ""
    return Group(
        child=child,
        role=child.label(protocol.LABEL_ROLE),
        revision=child.label(protocol.LABEL_REVISION),
        serial=int(serial) if serial.isdecimal() else 0,
        pods=tuple(pods.get(child.name, ())),
        size=nodes_of(child.content.get("spec", {}).get("template", {})),
    )


def last_serial(existing: Iterable[Group], remembered: str | None) -> int:
    """Return the highest number that a group was given so far; ``remembered`` is the router's Service annotation."""
    known = int(remembered) if remembered and remembered.isdecimal() else 0
    return max([known, *(group.serial for group in existing)])


def new_names(uid: str, pool: str, role: str, after: int, count: int, taken: Iterable[str]) -> list[tuple[int, str]]:
    """Return ``count`` serials above ``after`` with the names made from them, none of which is ``taken``.

    The same input gives the same names: a plan made twice creates nothing twice.
    """
    used, serial = set(taken), after
    result: list[tuple[int, str]] = []
    while len(result) < count:
        serial += 1
        name = f"{pool}-{role}-{_suffix(f'{uid}/{role}/{serial}')}"
        if name not in used:
            used.add(name)
            result.append((serial, name))
    return result


def _suffix(seed: str) -> str:
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big")
    characters = []
    for _ in range(_SUFFIX):
        number, digit = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[digit])
    return "".join(characters)
