"""Serving groups: which exist, which must be made, which must go, and what they are called.

A group is one model replica: one StatefulSet that is created and deleted whole, under a name that is never used
again (a lost node's pods keep their names until the node is back). A group goes by being *retired* first: marked and
scaled to 0, then deleted when its last pod is gone.

Rules for a change of revision, per role with N wanted groups:

* at most one group more than N (those of other revisions that still have pods count, unless a lost node holds them);
* a group of which a lost node holds a pod goes at once: that pod's name is taken, so it can never be whole again;
* a group of an old revision that is not ready goes at once;
* a ready one goes when N others are ready and every role has a ready group of the new revision;
* the last old group of a role goes only when every role is complete in the new revision, because a pair works only
  within one revision: neither revision is ever left with one stage alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
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

    @property
    def name(self) -> str:
        """Return the group's name, which is its StatefulSet's."""
        return self.child.name

    @property
    def retired(self) -> bool:
        """Return whether the group is on its way out."""
        return self.child.deleting or self.child.annotation(names.RETIRED_ANNOTATION) == "true"

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
    def gone(self) -> bool:
        """Return whether a retired group has no pod left, as its controller says too."""
        return self.child.seen and self.child.pods == 0 and not self.pods

    def lost(self, now: float) -> bool:
        """Return whether all that is left of the group is pods that a lost node holds."""
        return bool(self.pods) and all(_overdue(pod, now) for pod in self.pods)

    def torn(self, now: float) -> bool:
        """Return whether a lost node holds a pod of the group: its name is taken, so nothing can replace it."""
        return any(_overdue(pod, now) for pod in self.pods)


def _overdue(pod: PodView, now: float) -> bool:
    return pod.deadline is not None and now > pod.deadline + LOST_AFTER


@dataclass(frozen=True, slots=True)
class RoleChange:
    """What must happen to a role's groups. ``retire`` is ordered, the first one is the least missed."""

    create: int
    retire: tuple[Group, ...]


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


def changes(existing: Iterable[Group], wanted: Mapping[str, int], revision: str, now: float) -> dict[str, RoleChange]:
    """Return what must happen per role; ``wanted`` holds the number of groups of every role that the pool has."""
    existing = tuple(existing)
    by_role = {role: [group for group in existing if group.role == role] for role in protocol.ROLES}
    ready = Counter(group.role for group in existing if group.ready and group.revision == revision)
    begun = all(ready[role] >= min(1, count) for role, count in wanted.items())
    complete = all(ready[role] >= count for role, count in wanted.items())
    return {
        role: _role_change(members, wanted.get(role, 0), revision, now, begun=begun, complete=complete)
        for role, members in by_role.items()
    }


def _role_change(
    members: list[Group], wanted: int, revision: str, now: float, *, begun: bool, complete: bool
) -> RoleChange:
    torn = [group for group in members if not group.retired and group.torn(now)]
    live = [group for group in members if not group.retired and group not in torn]
    new = [group for group in live if group.revision == revision]
    old = [group for group in live if group.revision != revision]
    leaving = [group for group in members if group.retired and group.revision != revision and not group.lost(now)]
    room = wanted + 1 - len(new) - len(old) - len(leaving) if old or leaving else wanted - len(new)
    create = max(0, min(wanted - len(new), room))
    retire = torn + _leaving_old(old, new, wanted, begun=begun, complete=complete) + _excess(new, wanted)
    return RoleChange(create, tuple(retire))


def _leaving_old(old: list[Group], new: list[Group], wanted: int, *, begun: bool, complete: bool) -> list[Group]:
    broken = [group for group in old if not group.ready]
    serving = sorted((group for group in old if group.ready), key=lambda group: -group.serial)
    ready_new = sum(group.ready for group in new)
    spare = len(serving) + (ready_new if begun else 0) - wanted
    held = 0 if complete else 1
    return broken + serving[: max(0, min(spare, len(serving) - held))]


def _excess(new: list[Group], wanted: int) -> list[Group]:
    by_worth = sorted(new, key=lambda group: (group.ready, -group.serial))
    return by_worth[: max(0, len(new) - wanted)]


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
