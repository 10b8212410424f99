"""Which group goes when one must: the one whose loss costs least.

In this order: what does not serve, what is outdated, what is worst placed, what is cheapest to lose in tokens (work in
flight that is waited for, and what its cache has spared lately and would be computed again), and between equals the
newest, so that the same pool always gives the same answer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from twinpool.operator.logic import books

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Observed


@dataclass(frozen=True, slots=True)
class Facts:
    """What a group's loss would cost."""

    outdated: bool = False
    #: Other groups of its role on its nodes: the more, the less their common node's end would leave.
    crowding: int = 0
    #: Tokens that routers have sent it and not seen finished, KV that waits to be pulled, and prompt tokens that its
    #: cache has spared lately.
    work: int = 0


_NONE = Facts()


class Choosable(Protocol):
    """A group as far as the choice looks at it itself."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def serial(self) -> int:
        """The greater the newer."""

    @property
    def ready(self) -> bool:
        """Whether it serves."""


_Some = TypeVar("_Some", bound=Choosable)


def order(groups: Iterable[_Some], facts: Mapping[str, Facts]) -> list[_Some]:
    """Return the groups in the order in which they should go; ``facts`` by name may lack any."""

    def cost(group: _Some) -> tuple[bool, bool, int, int, int, str]:
        known = facts.get(group.name, _NONE)
        return group.ready, not known.outdated, -known.crowding, known.work, -group.serial, group.name

    return sorted(groups, key=cost)


def facts(observed: Observed, groups: Iterable[Group], revision: str) -> dict[str, Facts]:
    """Return what is known of each group; without answers from routers all have the same work."""
    live = [group for group in groups if not group.retired]
    nodes = Counter((group.role, node) for group in live for node in _nodes(group))
    return {
        group.name: Facts(
            outdated=group.revision != revision,
            crowding=sum(nodes[group.role, node] - 1 for node in _nodes(group)),
            work=_work(observed, group),
        )
        for group in live
    }


def choosing(observed: Observed, groups: Iterable[Group], wanted: Mapping[str, int]) -> bool:
    """Return whether a scale-in must choose between groups of one revision, for which the routers are asked first."""
    live: dict[str, list[Group]] = {}
    for group in groups:
        if not group.retired:
            live.setdefault(group.role, []).append(group)
    return bool(books.serving_routers(observed.pods)) and any(
        0 < wanted.get(role, 0) < len(members) and len({group.revision for group in members}) == 1
        for role, members in live.items()
    )


def _nodes(group: Group) -> set[str]:
    return {pod.node for pod in group.pods if pod.node}


def _work(observed: Observed, group: Group) -> int:
    uids = {pod.uid for pod in group.pods if pod.rank == 0}
    entries = [
        entry
        for report in (observed.reports or {}).values()
        if report is not None
        for uid, entry in report.entries.items()
        if uid in uids
    ]
    return sum(entry.tokens + entry.in_flight + entry.unpulled + entry.cached for entry in entries)
