"""``twinpool defragment --apply``: the moves of a proposal, one by one, while what happens is what was foretold.

What decides is :mod:`twinpool.operator.logic.placement.moving`; here the cluster is asked and told.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinpool.cli.pools import observe
from twinpool.core.units import parse_duration
from twinpool.operator.logic import names
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.placement.moving import Budget, Progress, obstacle, progress, short_name
from twinpool.operator.logic.ratio import wanted

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.cli.kubectl import Kubectl
    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Observed
    from twinpool.operator.logic.placement.defragment import Move

#: Seconds between two looks at the pool, and beyond the times that its spec allows for starting and draining.
_PAUSE, _BEYOND = 2.0, 120.0


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of one move; ``reason`` is empty when it went as foretold."""

    group: str
    successor: str
    seconds: float
    reason: str = ""


class Mover:
    """Moves groups of one pool. ``say`` is told every stage, ``again`` what would be proposed now."""

    def __init__(
        self, kubectl: Kubectl, pool: str, say: Callable[[str], None], again: Callable[[Observed], list[Move]]
    ) -> None:
        self._kubectl, self._pool, self._say, self._again = kubectl, pool, say, again

    def carry_out(self, moves: list[Move]) -> list[Moved]:
        """Make the moves in order and return what became of them; the first that goes otherwise is the last."""
        result: list[Moved] = []
        for move in moves:
            result.append(self._one(move))
            if result[-1].reason:
                break
        return result

    def _one(self, move: Move) -> Moved:
        began = time.monotonic()
        observed, existing = self._look()
        if why := self._obstacle(move, observed, existing):
            return Moved(short_name(move), "", 0.0, why)
        known = {group.name for group in existing}
        self._mark(next(group for group in existing if group.name == short_name(move)))
        last = Progress("waiting", f"group {short_name(move)} gets no new requests")
        patience = self._patience(observed, move.role)
        while last.stage not in ("done", "departed"):
            if time.monotonic() - began > patience:
                return Moved(short_name(move), last.successor, time.monotonic() - began, self._late(last, patience))
            self._say(f"{short_name(move)}: {last.words}")
            time.sleep(_PAUSE)
            last = progress(move, known, self._look()[1])
        self._say(f"{short_name(move)}: {last.words}")
        reason = last.words if last.stage == "departed" else ""
        return Moved(short_name(move), last.successor, time.monotonic() - began, reason)

    def _look(self) -> tuple[Observed, tuple[Group, ...]]:
        observed = observe(self._kubectl, self._pool)[0]
        return observed, groups(observed)

    def _obstacle(self, move: Move, observed: Observed, existing: tuple[Group, ...]) -> str:
        pool, counts = observed.pool, wanted(observed.pool)
        surge = {role: pool.spec.rollout.bounds(role, count)[0] for role, count in counts.items()}
        if why := obstacle(move, existing, counts, surge, self._budgets()):
            return why
        now = self._again(observed)
        if not any((each.gang, each.here, each.there) == (move.gang, move.here, move.there) for each in now):
            return "the move would not pay any more, or go elsewhere; ask for a new proposal"
        return ""

    def _budgets(self) -> list[Budget]:
        return [_budget(item) for item in self._kubectl.get("poddisruptionbudgets")["items"]]

    def _mark(self, group: Group) -> None:
        """Take the group out of service, provided that it is still the one that was seen."""
        version = f"--resource-version={group.child.resource_version}"
        self._kubectl.run("annotate", "statefulset", group.name, f"{names.RETIRED_ANNOTATION}=true", version)

    @staticmethod
    def _patience(observed: Observed, role: str) -> float:
        spec = names.roles(observed.pool)[role]
        return parse_duration(spec.startup_timeout) + 2 * parse_duration(spec.drain_timeout) + _BEYOND

    def _late(self, last: Progress, patience: float) -> str:
        conditions = {item.type: item for item in self._look()[0].pool.status.conditions}
        placed = conditions.get("Placed")
        why = f"; {placed.message}" if placed and placed.status == "False" else ""
        return f"not done after {patience:.0f} s: {last.words}{why}"


def _budget(item: dict[str, Any]) -> Budget:
    selector = (item.get("spec") or {}).get("selector") or {}
    return Budget(
        item["metadata"]["name"],
        dict(selector.get("matchLabels") or {}),
        (item.get("status") or {}).get("disruptionsAllowed", 0),
        other=bool(selector.get("matchExpressions")),
    )
