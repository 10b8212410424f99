"""The same question put to an exact solver: a mixed integer program of the objective in ``docs/placement.md``.

Written from the definition, without the planner's search. HiGHS solves it through ``highspy``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import highspy

from twinpool.operator.logic.placement.eligible import eligible
from twinpool.operator.logic.placement.score import gpus
from twinpool.operator.logic.placement.tree import tree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.placement.cases import Case
    from twinpool.core.topology import Weights
    from twinpool.operator.logic.placement.model import Gang


@dataclass(frozen=True)
class Optimum:
    """The best places there are, and the objective there."""

    places: dict[str, tuple[str, ...]]
    objective: float


class Program:
    """The program of one case for some of its groups, all of which must have a place."""

    def __init__(self, case: Case, groups: Sequence[Gang], weights: Weights, *, feasibility: bool = False) -> None:
        self._case, self._groups, self._weights = case, groups, weights
        self._tree = tree(case.topology, case.nodes)
        self._solver: Any = highspy.Highs()
        self._solver.silent()
        self._inside = [frozenset(self._tree.members(at)) for at in range(len(self._tree.level))]
        #: Pods of a unit of a group on each node.
        self._pods: dict[tuple[str, int], list[Any]] = {}
        #: Whether a group, or a unit of one, lies wholly in a domain.
        self._whole: dict[str, list[Any]] = {}
        self._cost: Any = 0.0
        for group in groups:
            self._variables(group)
        self._capacity()
        if not feasibility:
            self._stranding()
            self._pools()

    def solve(self) -> Optimum | None:
        """Return the optimum, or None when the groups cannot all be placed."""
        self._solver.minimize(self._cost)
        if self._solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        places = {}
        for group in self._groups:
            at: list[str] = []
            for unit in range(group.pods // group.unit):
                for node, variable in zip(self._tree.nodes, self._pods[group.name, unit], strict=True):
                    at += [node.name] * round(self._solver.val(variable))
            places[group.name] = tuple(at)
        return Optimum(places, float(self._solver.getInfo().objective_function_value))

    def _variables(self, group: Gang) -> None:
        solver, nodes = self._solver, self._tree.nodes
        wants, topology = self._case.constraints[group.pool], self._case.topology
        units = [[solver.addIntegral(0, group.unit if eligible(node, group) else 0) for node in nodes]
                 for _ in range(group.pods // group.unit)]  # fmt: skip
        for unit, row in enumerate(units):
            self._pods[group.name, unit] = row
            solver.addConstr(sum(row) == group.unit)
            if wants.tensor_required and group.unit > 1:
                self._confine([row], group.unit, topology.index(wants.tensor))
        total = [sum(column) for column in zip(*units, strict=True)]
        if wants.expert_required and group.pods > 1:
            self._confine([total], group.pods, topology.index(wants.expert))
        self._whole[group.name] = self._located(total, group.pods)
        if group.pods > 1:
            self._spans(group, units)

    def _confine(self, rows: list[list[Any]], count: int, level: int) -> None:
        """Let all pods lie in one domain of a level."""
        covers = self._tree.cover(level)
        chosen = {at: self._solver.addBinary() for at in covers}
        self._solver.addConstr(sum(chosen.values()) == 1)
        for row in rows:
            for at in covers:
                self._solver.addConstr(sum(row[node] for node in self._inside[at]) <= count * chosen[at])

    def _located(self, row: list[Any], count: int) -> list[Any]:
        """Return for each domain a variable that is 1 exactly when all pods lie in it."""
        result = []
        for inside in self._inside:
            pods, variable = sum(row[node] for node in inside), self._solver.addBinary()
            self._solver.addConstr(pods >= count * variable)
            self._solver.addConstr(pods - (count - 1) <= variable)
            result.append(variable)
        return result

    def _price(self, whole: list[Any]) -> Any:
        """Return the price of the widest link: the cluster's, less what each domain around everything saves."""
        saved = sum(self._tree.gain[at] * whole[at] for at in range(1, len(whole)))
        return self._case.topology.price(0) - saved

    def _spans(self, group: Gang, units: list[list[Any]]) -> None:
        weights, whole = self._weights, self._whole[group.name]
        level = self._case.topology.index(self._case.constraints[group.pool].expert)
        together = sum(whole[at] for at in self._tree.cover(level))
        self._cost += group.worth * (weights.span * self._price(whole) + weights.outside * (1 - together))
        if group.unit > 1:
            for row in units:
                share = group.worth * group.unit / group.pods
                self._cost += weights.tensor * share * self._price(self._located(row, group.unit))

    def _taken(self, node: int, resource: str) -> Any:
        return sum(
            group.amounts.get(resource, 0) * self._pods[group.name, unit][node]
            for group in self._groups
            for unit in range(group.pods // group.unit)
            if group.amounts.get(resource, 0)
        )

    def _capacity(self) -> None:
        for index, node in enumerate(self._tree.nodes):
            for resource in sorted({name for group in self._groups for name in group.amounts}):
                held = sum(holder.amounts.get(resource, 0) for holder in node.holders)
                taken = self._taken(index, resource)
                if not isinstance(taken, int):
                    self._solver.addConstr(taken <= max(0, node.allocatable.get(resource, 0) - held))

    def _stranding(self) -> None:
        for resource in sorted({group.accelerator for group in self._case.groups if group.accelerator}):
            size, free = gpus(self._tree, resource)
            for at, inside in enumerate(self._inside):
                name = self._case.topology.levels[self._tree.level[at]].name
                weight = self._weights.stranded.get(name, 0.0)
                whole, left = sum(size[node] for node in inside), sum(free[node] for node in inside)
                if not weight or not whole:
                    continue
                taken: Any = sum(self._taken(node, resource) for node in inside if size[node])
                if left < whole:
                    self._cost += weight * (left - taken)
                elif not isinstance(taken, int):
                    opened = self._solver.addBinary()
                    self._solver.addConstr(taken <= whole * opened)
                    self._cost += weight * (whole * opened - taken)

    def _pools(self) -> None:
        for pool in sorted({group.pool for group in self._case.groups}):
            members = [group for group in self._case.groups if group.pool == pool]
            self._kv(pool, members)
            for role in ("prefill", "decode"):
                self._spread(pool, [group for group in members if group.role == role])

    def _count(self, gangs: list[Gang], at: int) -> Any:
        return sum(self._whole[gang.name][at] for gang in gangs if gang.name in self._whole)

    def _kv(self, pool: str, members: list[Gang]) -> None:
        makers = [group for group in members if group.role == "prefill"]
        takers = [group for group in members if group.role == "decode"]
        there = [sum(group.name in self._whole for group in side) for side in (makers, takers)]
        if not makers or not takers or not all(there):
            return
        weights, topology, wants = self._weights, self._case.topology, self._case.constraints[pool]
        worth = sum(group.worth for group in members)
        whole = min(there[0] / len(makers), there[1] / len(takers))
        near = self._tree.cover(topology.index(wants.pair))
        farthest = topology.price(0) - topology.price(topology.host)
        self._cost += worth * whole * (weights.handoff * farthest + weights.pair)
        for at in range(1, len(self._inside)):
            kept = self._solver.addVariable(0.0, 1.0)
            self._solver.addConstr(kept * len(makers) <= self._count(makers, at))
            self._solver.addConstr(kept * len(takers) <= self._count(takers, at))
            worthy = weights.handoff * self._tree.gain[at] + (weights.pair if at in near else 0.0)
            self._cost -= worth * worthy * kept

    def _spread(self, pool: str, groups: list[Gang]) -> None:
        placed = sum(group.name in self._whole for group in groups)
        if placed < 2:
            return
        scale = self._weights.spread * sum(group.worth for group in groups) / len(groups) ** 2
        for at in self._tree.cover(self._case.topology.index(self._case.constraints[pool].spread)):
            steps = [self._solver.addVariable(0.0, 1.0) for _ in range(placed)]
            self._solver.addConstr(sum(steps) == self._count(groups, at))
            self._cost += sum(2 * scale * number * step for number, step in enumerate(steps))
