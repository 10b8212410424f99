"""What must hold of every answer, checked with nothing of the planner but its types."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from twinpool.core.topology import Path, paths

if TYPE_CHECKING:
    from bench.placement.cases import Case
    from twinpool.operator.logic.placement.model import Assignment, Gang


def violations(case: Case, answer: Assignment) -> list[str]:
    """Return what is wrong with an answer; empty when nothing is."""
    found = _whole(case, answer) + _capacity(case, answer)
    domains, _ = paths(case.topology, {node.name: node.labels for node in case.nodes})
    for group in case.groups:
        if group.name in answer.places and group.name not in case.placed:
            found += _hard(case, group, [domains[name] for name in answer.places[group.name]])
    return found


def _whole(case: Case, answer: Assignment) -> list[str]:
    found = []
    for group in case.groups:
        at = answer.places.get(group.name)
        if (at is None) != (group.name in answer.short):
            found.append(f"{group.name} has both a place and a shortfall, or neither")
        if at is not None and len(at) != group.pods:
            found.append(f"{group.name} has {len(at)} of {group.pods} pods placed")
    if strangers := set(answer.places) - {group.name for group in case.groups}:
        found.append(f"{strangers} were never asked for")
    return found


def _capacity(case: Case, answer: Assignment) -> list[str]:
    taken: dict[str, Counter[str]] = {node.name: Counter() for node in case.nodes}
    for node in case.nodes:
        for holder in node.holders:
            taken[node.name].update(holder.amounts)
    for group in case.groups:
        for name in answer.places.get(group.name, ()):
            taken[name].update(group.amounts)
    return [
        f"{node.name} gives {amount} of {node.allocatable.get(resource, 0)} {resource}"
        for node in case.nodes
        for resource, amount in taken[node.name].items()
        if amount > node.allocatable.get(resource, 0)
    ]


def _hard(case: Case, group: Gang, domains: list[Path]) -> list[str]:
    wants, found = case.constraints[group.pool], []
    if wants.expert_required and not _together(domains, case.topology.index(wants.expert)):
        found.append(f"{group.name} is not within one {wants.expert}")
    units = [domains[start : start + group.unit] for start in range(0, group.pods, group.unit)]
    level = case.topology.index(wants.tensor)
    if wants.tensor_required and not all(_together(unit, level) for unit in units):
        found.append(f"a tensor unit of {group.name} is not within one {wants.tensor}")
    return found


def _together(domains: list[Path], level: int) -> bool:
    """Return whether nodes share a domain of a level or a narrower one; a domain is its whole path from the cluster."""
    return any(
        domains[0][at] is not None and len({path[: at + 1] for path in domains}) == 1
        for at in range(level, len(domains[0]))
    )
