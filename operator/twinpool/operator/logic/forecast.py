"""What a rollout will do, step by step, before it does it: the planner run against groups that behave.

Every group that is made becomes ready, every one that is let go ends, both before the next step; what is not ready now
stays so. Real ones take their time, and the planner then takes other steps to the same end.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.operator.logic.rollout import Health, State, Step, Unit, step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a forecast: what is done, and the ready groups by role and revision once it has come true."""

    step: Step
    ready: Mapping[tuple[str, str], int]


def forecast(state: State) -> Iterator[Stage]:
    """Yield the steps until nothing is left to do; there are at most a few for each group."""
    most = 10 + 4 * (len(state.units) + sum(limits.wanted for limits in state.bounds.values()))
    return itertools.islice(_stages(state), most)


def _stages(state: State) -> Iterator[Stage]:
    made = 0
    units = list(state.units)
    while (todo := step(state)) or any(_moves(unit, todo.revision) for unit in units):
        for role, count in todo.create.items():
            units += [Unit(f"new {made + n + 1}", role, todo.revision, Health.WAITING) for n in range(count)]
            made += count
        kept = [unit for unit in units if unit.health is not Health.LEAVING and unit.name not in todo.retire]
        units = [_started(unit, todo.revision) for unit in kept]
        yield Stage(todo, ready(units))
        state = dataclasses.replace(state, units=tuple(sorted(units, key=lambda unit: unit.health is Health.READY)))


def _moves(unit: Unit, revision: str) -> bool:
    return unit.health is Health.LEAVING or _started(unit, revision) is not unit


def _started(unit: Unit, revision: str) -> Unit:
    starts = unit.health is Health.WAITING and unit.revision == revision
    return dataclasses.replace(unit, health=Health.READY) if starts else unit


def ready(units: list[Unit]) -> dict[tuple[str, str], int]:
    """Return the ready groups by role and revision, prefill first."""
    found = Counter((unit.role, unit.revision) for unit in units if unit.health is Health.READY)
    return {key: found[key] for key in sorted(found, key=lambda key: (key[0] != protocol.ROLES[0], key[1]))}
