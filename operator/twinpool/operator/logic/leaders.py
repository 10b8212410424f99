"""Telling the pods of a group that spans nodes who leads it.

The leader is the pod of ordinal 0, known by address and uid. The StatefulSet keeps the leader named last, with a number
that counts up, so that no epoch is used twice whatever happens to pods or operator; the pods carry a copy, which their
launchers read as a file. Ranks so find their leader without DNS, and notice a new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.core.protocol import Leader
from twinpool.operator.logic.actions import Annotate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.operator.logic.groups import Group


def naming(groups: Iterable[Group]) -> list[Annotate]:
    """Return the annotations that are missing or out of date; the set's comes before those of its pods."""
    return [action for group in groups if group.size > 1 and not group.child.deleting for action in _group(group)]


def _group(group: Group) -> list[Annotate]:
    known = group.child.annotation(protocol.ANNOTATION_LEADER) or ""
    named = Leader.from_json(known)
    pod = group.leader
    if pod is not None and pod.address and pod.deadline is None and not _is(named, pod.address, pod.uid):
        named = Leader(pod.address, pod.uid, named.epoch + 1 if named else 1)
    if named is None:
        return []
    value = named.to_json()
    key = protocol.ANNOTATION_LEADER
    result = [] if value == known else [Annotate("StatefulSet", group.name, group.child.uid, key, value)]
    behind = [pod for pod in group.pods if pod.leader != value and pod.deadline is None]
    return result + [Annotate("Pod", pod.name, pod.uid, key, value) for pod in behind]


def _is(leader: Leader | None, address: str, uid: str) -> bool:
    return leader is not None and (leader.address, leader.uid) == (address, uid)
