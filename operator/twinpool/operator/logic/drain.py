"""How a group goes: marked, then its routers finish what they sent it, then it is scaled to 0.

The deadline is set once, when the group is marked, and stands on the StatefulSet, so that an operator that starts in
the middle goes on with it. Nothing here is needed for safety: whatever ends a pod, its launcher serves on until the
engine is idle and its KV cache is pulled. What this side adds is that nothing new arrives meanwhile, that the routers'
books decide instead of a guess, and that no rank goes while the leader still serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.operator.logic import books
from twinpool.operator.logic.actions import Action, Annotate, DrainResult, Retire, ScaleToZero
from twinpool.operator.logic.observed import seconds, timestamp
from twinpool.operator.logic.timing import drain_seconds

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Observed, PodView


def retire(group: Group, now: float, kept: str | None = None) -> Retire:
    """Return the mark that takes a group out of service; its requests may run until the time it holds.

    ``kept`` is until when its pods stay in any case.
    """
    until = timestamp(now + drain_seconds(group.child))
    return Retire(group.name, group.child.uid, group.child.resource_version, until, kept)


def drains(
    observed: Observed, groups: Iterable[Group], now: float, kept: Collection[str] = frozenset()
) -> list[Action]:
    """Return the next step of every group that is on its way out; the pods of those that are ``kept`` stay."""
    return [action for group in groups for action in _step(observed, group, now, kept=group.name in kept)]


def draining(group: Group) -> bool:
    """Return whether a group is marked and still has its pods."""
    return group.retired and not group.child.deleting and group.replicas > 0


def deadline(group: Group) -> float | None:
    """Return until when the requests of a marked group may run, in seconds since 1970."""
    return seconds(group.child.annotation(protocol.ANNOTATION_DRAINING)) if draining(group) else None


def strays(groups: Iterable[Group]) -> list[Action]:
    """Return the marks to take off pods whose group stays: a mark that nobody follows up would waste the group."""
    return [
        _mark(pod, None)
        for group in groups
        if not group.retired
        for pod in group.pods
        if pod.draining and pod.deadline is None
    ]


def _step(observed: Observed, group: Group, now: float, *, kept: bool) -> list[Action]:
    if not draining(group):
        return []
    until = deadline(group)
    if until is None:
        return [retire(group, now)]
    if not _serves(group):
        return [_scale(group, "not_serving")]
    unmarked = [pod for pod in group.pods if pod.deadline is None and not pod.draining]
    marks: list[Action] = [_mark(pod, timestamp(until)) for pod in unmarked]
    if kept:
        return marks
    if now >= until:
        return [_scale(group, "deadline")]
    if not marks and _idle(observed, group):
        return [_scale(group, "drained")]
    return marks


def _mark(pod: PodView, until: str | None) -> Annotate:
    return Annotate("Pod", pod.name, pod.uid, protocol.ANNOTATION_DRAINING, until)


def _scale(group: Group, result: DrainResult) -> ScaleToZero:
    return ScaleToZero(group.name, group.child.uid, group.child.resource_version, result)


def _serves(group: Group) -> bool:
    """Return whether requests can run: those of an engine that has ended or that is being deleted need no watching."""
    leader = group.leader
    return leader is not None and leader.containers_ready and leader.deadline is None


def _idle(observed: Observed, group: Group) -> bool:
    """Return whether every router says that the group gets nothing new and owes nothing."""
    leader = group.leader
    asked = books.routers(observed.pods)
    if leader is None or not asked:
        return True
    if observed.reports is None:
        return False
    for router in asked:
        entry = books.entry(observed.reports.get(router.name), leader.uid)
        silent_but_going = entry is None and not (router.ready and router.deadline is None)
        if not silent_but_going and not (entry is not None and entry.idle):
            return False
    return True
