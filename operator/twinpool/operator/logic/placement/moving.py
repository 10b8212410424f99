"""Carrying out one move of a defragmentation: whether it may begin, how far it is, and when to give up.

A group is moved by being marked as on its way out: it gets no new requests, the operator opens its successor while it
still holds its nodes, and it goes when its requests have ended. So what was foretold for the successor is what it gets,
unless something else happened meanwhile, which ends the whole proposal: nothing is moved on a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.placement.defragment import Move


@dataclass(frozen=True, slots=True)
class Budget:
    """A PodDisruptionBudget: the labels that it matches, and how many pods it lets go now.

    ``other`` tells that it selects by more than labels, of which nothing is known here.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    allowed: int = 0
    other: bool = False

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether pods with these labels are, or may be, under the budget."""
        return all(labels.get(key) == value for key, value in self.labels.items())


#: ``waiting``: for the successor to be opened or to get its nodes; ``loading``: it has those that were foretold;
#: ``leaving``: it serves and the group is not gone yet; ``done``; ``departed``: something else happened.
Stage = Literal["waiting", "loading", "leaving", "done", "departed"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a move is, in words too; ``successor`` is empty until there is one."""

    stage: Stage
    words: str
    successor: str = ""


def obstacle(
    move: Move,
    groups: Sequence[Group],
    wanted: Mapping[str, int],
    surge: Mapping[str, int],
    budgets: Sequence[Budget],
) -> str:
    """Return why a move may not begin now and what to do about it; empty when it may.

    ``groups`` are all of the pool, ``wanted`` and ``surge`` are counts of groups by role.
    """
    live = [group for group in groups if not group.retired]
    group = next((group for group in live if group.name == short_name(move)), None)
    if group is None:
        return f"group {short_name(move)} is not there any more; ask for a new proposal"
    if len(live) < len(groups):
        return "other groups are on their way out; wait until they are gone"
    lacking = [f"{sum(each.role == role for each in live)} of {count} {role}" for role, count in wanted.items()]
    if any(sum(each.role == role for each in live) != count for role, count in wanted.items()):
        return f"there are {', '.join(lacking)} groups; wait until the pool is as it should be"
    if unready := [each.name for each in live if not each.ready]:
        return f"group {unready[0]} does not serve, and a move would leave one fewer; wait until it does"
    if surge.get(move.role, 0) == 0:
        return (
            f"rollout.maxSurge (or the GPU budget) allows no {move.role} group beside those that are there, so the "
            "successor would come only when the group is gone; allow one more"
        )
    return _held(group, budgets)


def _held(group: Group, budgets: Sequence[Budget]) -> str:
    template = group.child.content.get("spec", {}).get("template", {})
    labels = (template.get("metadata") or {}).get("labels") or {}
    for budget in budgets:
        if budget.matches(labels) and budget.allowed < 1:
            unsure = " (which may not be meant for it)" if budget.other else ""
            return f"PodDisruptionBudget {budget.name}{unsure} lets no pod of group {group.name} go now; wait"
    return ""


def short_name(move: Move) -> str:
    """Return the moved group's name in its namespace."""
    return move.gang.partition("/")[2]


def progress(move: Move, known: Collection[str], groups: Sequence[Group]) -> Progress:
    """Return how far a move is; ``known`` are the groups that were there when it began."""
    there = {group.name: group for group in groups}
    news = [group for group in groups if group.name not in known and not group.retired]
    old = there.get(short_name(move))
    if old is not None and not old.retired:
        return Progress("departed", f"somebody took the mark off group {old.name} again")
    if lost := sorted(
        name for name in known if name != short_name(move) and (name not in there or there[name].retired)
    ):
        return Progress("departed", f"group {lost[0]} goes too: something else changes the pool")
    if len(news) > 1 or any(group.role != move.role for group in news):
        return Progress("departed", f"{len(news)} groups came: something else changes the pool")
    if not news:
        return Progress("waiting", "the operator opens the successor")
    successor = news[0]
    nodes = {pod.rank: pod.node for pod in successor.pods if pod.node and pod.deadline is None}
    if len(nodes) < successor.size:
        return Progress("waiting", f"{successor.name} has {len(nodes)} of {successor.size} nodes", successor.name)
    where = tuple(nodes[rank] for rank in sorted(nodes))
    if sorted(where) != sorted(move.there):
        text = f"{successor.name} went to {', '.join(where)}, not to {', '.join(move.there)} as foretold"
        return Progress("departed", text, successor.name)
    if not successor.ready:
        return Progress("loading", f"{successor.name} loads on {', '.join(where)}", successor.name)
    if old is not None:
        return Progress("leaving", f"{successor.name} serves; {old.name} ends its requests", successor.name)
    return Progress("done", f"{successor.name} serves on {', '.join(where)}", successor.name)
