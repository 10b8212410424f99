"""Another writer on our children: a hand edit is repaired, a controller that insists is reported and left alone.

An autoscaler that was pointed at a group's StatefulSet, or a second manager of our fields, changes a child again and
again. Repairing it each time would be a war of writes that nobody sees and everybody pays for. So what was repaired
:data:`PATIENCE` times within :data:`WINDOW` against the same writer is left as it is for :data:`TRUCE` and named in a
condition; then it is tried again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinpool.operator.logic.actions import Apply
from twinpool.operator.logic.drift import APPLIED_ANNOTATION, in_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from twinpool.operator.logic.observed import Child

PATIENCE = 3
WINDOW = 180.0
TRUCE = 300.0


@dataclass(frozen=True, slots=True)
class Repair:
    """A child that said something else than what was applied to it, and was put right; ``by`` names the writer."""

    kind: str
    name: str
    by: str
    at: float


@dataclass(frozen=True, slots=True)
class Contest:
    """A child that is left to another writer for now; ``until`` is in seconds since 1970."""

    kind: str
    name: str
    by: str
    until: float

    def words(self) -> str:
        """Return what is going on and what to do."""
        who = self.by or "somebody"
        return (
            f"{who} keeps changing {self.kind} {self.name}, which belongs to this pool; it is left as it is for some "
            f"minutes. Remove that writer (an autoscaler on the {self.kind}?); to scale, scale the pool"
        )


def contests(repairs: Iterable[Repair], now: float) -> tuple[Contest, ...]:
    """Return what is left to others at ``now``, by kind and name."""
    times: dict[tuple[str, str, str], list[float]] = {}
    for repair in repairs:
        times.setdefault((repair.kind, repair.name, repair.by), []).append(repair.at)
    found = []
    for (kind, name, by), when in sorted(times.items()):
        last = sorted(when)[-PATIENCE:]
        if len(last) == PATIENCE and last[-1] - last[0] <= WINDOW and now < last[-1] + TRUCE:
            found.append(Contest(kind, name, by, last[-1] + TRUCE))
    return tuple(found)


def recent(repairs: Iterable[Repair], now: float) -> tuple[Repair, ...]:
    """Return the repairs that still count."""
    return tuple(repair for repair in repairs if now - repair.at < WINDOW + TRUCE)


def applies(
    bodies: Iterable[dict[str, Any]], children: Mapping[tuple[str, str], Child], left: Iterable[Contest]
) -> Iterator[Apply]:
    """Yield what must be applied: what is missing, new or changed by others, unless it is left to them."""
    contested = {(contest.kind, contest.name) for contest in left}
    for body in bodies:
        place = (body["kind"], body["metadata"]["name"])
        child = children.get(place)
        if in_place(child, body):
            continue
        if child is None:
            yield Apply(body)
            continue
        stamp = body["metadata"]["annotations"][APPLIED_ANNOTATION]
        repair = child.annotation(APPLIED_ANNOTATION) == stamp
        if not (repair and place in contested):
            yield Apply(body, child.uid, child.resource_version, child.writer if repair else None)
