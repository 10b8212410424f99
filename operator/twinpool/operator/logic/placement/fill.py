"""Where one more group fits best while all others stay: exact for a group of one pod, greedy inside a domain for more.

A group of several pods is tried in every domain that holds it, from the narrowest level outwards; domains that look
alike are tried once. What must lie together lies together, or the group has no place here.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from twinpool.operator.logic.placement.shape import EPSILON, Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twinpool.operator.logic.placement.board import Board
    from twinpool.operator.logic.placement.model import Gang

#: Domains that are tried for a group of several pods at levels broader than the narrowest one that holds it.
BROADER = 48


def insert(board: Board, gang: Gang, within: int = 0) -> bool:
    """Put a group where it adds least to the objective, inside a domain; return whether there was room."""
    nodes = best_place(board, gang, within)
    if nodes is None:
        return False
    board.put(gang, nodes)
    return True


def best_place(board: Board, gang: Gang, within: int = 0) -> tuple[int, ...] | None:
    """Return the nodes at which a group adds least to the objective, None when a domain has no room for it."""
    shape = board.shape(gang)
    if shape.slots[within] < gang.pods:
        return None
    if gang.pods == 1:
        return (_one(board, gang, shape, within),)
    return _several(board, gang, shape, within)


def _one(board: Board, gang: Gang, shape: Shape, within: int) -> int:
    pool = board.pools[gang.pool]
    touched = pool.touched
    wary = _wary(board, gang, ())

    def extra(domain: int) -> float | None:
        own, avoided = pool.delta(domain, gang.role) if domain in touched else None, wary(domain)
        return own if avoided is None else avoided + (own or 0.0)

    return shape.cheapest(within, extra)[1]


def _wary(board: Board, gang: Gang, taken: Sequence[int]) -> Callable[[int], float | None]:
    """Return what slow links add to a domain for the next pod of a group that has these nodes.

    None, as :meth:`Shape.cheapest` wants it, for a domain in which no such link ends.
    """
    if not board.slow:
        return lambda _: None
    ends = {other for node in taken for other in board.wary.get(node, ())}
    ends |= {node for node, others in board.wary.items() if node in others and gang.gpus > 1}
    leaves = {board.tree.leaf[node] for node in ends}
    around = {domain for leaf in leaves for domain in board.tree.around[leaf]}
    cost = board.weights.slow * gang.worth
    return lambda domain: cost if domain in leaves else 0.0 if domain in around else None


def _several(board: Board, gang: Gang, shape: Shape, within: int) -> tuple[int, ...] | None:
    before = board.cost(gang.pool)
    best: tuple[int, ...] | None = None
    least, left = inf, BROADER
    for level in range(board.tree.topology.host, _broadest(board, gang) - 1, -1):
        for domain in _containers(board, gang, shape, within, level):
            if best is not None and left <= 0:
                return best
            left -= 1
            nodes = _filled(board, gang, shape, domain)
            if nodes is None:
                continue
            board.settle(gang, nodes)
            cost = board.cost(gang.pool) - before
            board.drop(gang)
            shape.refresh()
            if cost < least - EPSILON:
                best, least = nodes, cost
    return best


def allowed(board: Board, gang: Gang, nodes: tuple[int, ...]) -> bool:
    """Return whether a group may lie on these nodes together, whatever is free on them."""
    wants, tree = board.pools[gang.pool].wants, board.tree
    if wants.expert_required and tree.level[tree.common(nodes)] < tree.topology.index(wants.expert):
        return False
    level = tree.topology.index(wants.tensor) if wants.tensor_required else 0
    starts = range(0, gang.pods, gang.unit)
    return all(tree.level[tree.common(nodes[start : start + gang.unit])] >= level for start in starts)


def _broadest(board: Board, gang: Gang) -> int:
    """Return the broadest level that may hold a group of several pods."""
    wants, topology = board.pools[gang.pool].wants, board.tree.topology
    whole = topology.index(wants.expert) if wants.expert_required else 0
    together = wants.tensor_required and gang.unit == gang.pods
    return max(whole, topology.index(wants.tensor) if together else 0)


def _containers(board: Board, gang: Gang, shape: Shape, within: int, level: int) -> list[int]:
    """Return the domains of a level that have room; where there are many, one of those that look alike."""
    tree, touched = board.tree, board.pools[gang.pool].touched
    inner = within if tree.level[within] else -1
    found = [
        domain
        for domain in tree.at[level]
        if shape.slots[domain] >= gang.pods and (inner < 0 or inner in tree.around[domain])
    ]
    if len(found) <= BROADER:
        return found
    alike: dict[object, int] = {}
    for domain in found:
        around = tree.around[domain]
        known = tuple(outer for outer in around[1:] if outer in touched)
        # Domains with a slow link look like no other.
        named = domain if board.slow and not board.wary.keys().isdisjoint(tree.members(domain)) else -1
        looks = (
            shape.slots[domain],
            round(shape.best[domain], 6),
            tuple(shape.own(outer) for outer in around),
            known,
            named,
        )
        alike.setdefault(looks, domain)
    return list(alike.values())


def _filled(board: Board, gang: Gang, shape: Shape, container: int) -> tuple[int, ...] | None:
    """Take a group's amounts inside a domain, unit by unit, and return the nodes; None when units do not fit."""
    nodes: list[int] = []
    for _ in range(gang.pods // gang.unit):
        domain = container if gang.unit in (1, gang.pods) else _unit_domain(board, gang, shape, container)
        if domain < 0:
            for node in nodes:
                board.take(gang, node, -1)
            shape.refresh()
            return None
        for _ in range(gang.unit):
            node = shape.cheapest(domain, _wary(board, gang, nodes))[1]
            board.take(gang, node)
            shape.refresh()
            nodes.append(node)
    return tuple(nodes)


def _unit_domain(board: Board, gang: Gang, shape: Shape, container: int) -> int:
    """Return the domain inside a container that fits a tensor-parallel unit best, -1 when there is none.

    The narrowest level first; of those the one that strands least, and then the fullest.
    """
    tree, wants = board.tree, board.pools[gang.pool].wants
    broadest = max(tree.level[container], tree.topology.index(wants.tensor) if wants.tensor_required else 0)
    for level in range(tree.topology.host, broadest - 1, -1):
        inside = [d for d in tree.at[level] if shape.slots[d] >= gang.unit and container in tree.around[d]]
        if inside:
            return min(inside, key=lambda domain: (round(shape.best[domain], 6), shape.slots[domain], domain))
    return -1
