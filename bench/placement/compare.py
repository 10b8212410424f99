"""Our answers beside the exact solver's, over many small random cases."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from bench.placement.cases import small
from bench.placement.check import violations
from bench.placement.exact import Program
from twinpool.core.topology import Weights
from twinpool.operator.logic.placement.place import place
from twinpool.operator.logic.placement.score import score
from twinpool.operator.logic.placement.tree import tree

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.operator.logic.placement.model import Gang


@dataclass(frozen=True)
class Comparison:
    """One case: how far above the optimum the objective is, as a share of it, and what is plainly wrong."""

    seed: int
    gap: float
    shortfalls: int
    wrong: tuple[str, ...]


def compare(seed: int) -> Comparison:
    """Solve one case both ways.

    Feasibility agrees when the solver finds places for none of the groups that were refused, beside those that were
    accepted before them; the optimum is over the accepted groups.
    """
    case, weights = small(Random(seed)), Weights()
    answer = place(case.groups, case.nodes, case.placed, case.topology, case.constraints, weights)
    wrong = violations(case, answer)
    accepted: list[Gang] = []
    for gang in case.groups:
        if gang.name not in answer.short:
            accepted.append(gang)
        elif Program(case, [*accepted, gang], weights, feasibility=True).solve() is not None:
            wrong.append(f"{gang.name} was refused although it fits")
    best = Program(case, accepted, weights).solve() if accepted else None
    if best is None:
        return Comparison(seed, 0.0, len(answer.short), (*wrong, *(["nothing fits"] if accepted else [])))
    domains = tree(case.topology, case.nodes)
    mine = score(case.groups, answer.places, domains, case.constraints, weights).total
    theirs = score(case.groups, best.places, domains, case.constraints, weights).total
    if abs(theirs - best.objective) > 1e-4 * max(1.0, theirs):
        wrong.append(f"the solver's objective is {best.objective:.4f}, the definition says {theirs:.4f}")
    gap = (mine - theirs) / theirs if theirs > 1e-9 else mine - theirs
    return Comparison(seed, gap if abs(gap) > 1e-6 else 0.0, len(answer.short), tuple(wrong))


def compared(seeds: Iterable[int]) -> list[Comparison]:
    """Solve many cases both ways."""
    return [compare(seed) for seed in seeds]
