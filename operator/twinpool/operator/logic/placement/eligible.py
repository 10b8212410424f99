"""Which nodes may hold a pod at all, by kube-scheduler's own rules: readiness, cordon, taints, selector, affinity."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinpool.operator.logic.placement.model import Gang, Match, Node, Taint, Tolerates


def usable(node: Node) -> bool:
    """Return whether new pods may go to a node at all."""
    return node.ready and not node.cordoned


def untolerated(node: Node, gang: Gang) -> Taint | None:
    """Return the first taint that keeps the group's pods away; ``PreferNoSchedule`` keeps nobody away."""
    for taint in node.taints:
        if taint.effect != "PreferNoSchedule" and not any(_tolerates(entry, taint) for entry in gang.tolerates):
            return taint
    return None


def _tolerates(entry: Tolerates, taint: Taint) -> bool:
    """As in kube-scheduler: no key with ``Exists`` tolerates everything, no effect stands for all of them."""
    if entry.effect and entry.effect != taint.effect:
        return False
    if entry.key and entry.key != taint.key:
        return False
    if entry.operator == "Exists":
        return True
    return bool(entry.key) and entry.value == taint.value


def selected(node: Node, gang: Gang) -> bool:
    """Return whether the node has the labels that the group asks for."""
    if any(node.labels.get(key) != value for key, value in gang.selector.items()):
        return False
    return not gang.terms or any(term and all(_matches(node, match) for match in term) for term in gang.terms)


def _matches(node: Node, match: Match) -> bool:
    value = node.name if match.field else node.labels.get(match.key)
    match match.operator:
        case "In":
            return value in match.values
        case "NotIn":
            return value not in match.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return _compares(value, match)


def _compares(value: str | None, match: Match) -> bool:
    """``Gt`` and ``Lt`` compare whole numbers; anything else matches nothing."""
    try:
        here, there = int(value or ""), int(match.values[0])
    except (ValueError, IndexError):
        return False
    return here > there if match.operator == "Gt" else match.operator == "Lt" and here < there


def eligible(node: Node, gang: Gang) -> bool:
    """Return whether the group's pods may go to a node, whatever is free on it."""
    return usable(node) and selected(node, gang) and untolerated(node, gang) is None
