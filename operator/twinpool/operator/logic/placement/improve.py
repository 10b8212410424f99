"""Making a whole placement better than one group at a time can: groups, pairs and pools are taken up and put down anew.

Only what is new moves. Each try is undone unless the objective falls, and the number of tries is bounded by the number
of groups and domains, never by time.
"""

from __future__ import annotations

from itertools import combinations, permutations
from typing import TYPE_CHECKING

from twinpool.operator.logic.placement.fill import allowed, insert
from twinpool.operator.logic.placement.shape import EPSILON

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from twinpool.operator.logic.placement.board import Board
    from twinpool.operator.logic.placement.model import Gang

#: Up to so many domains, every one of them is tried as the place where a pool begins; of more, the fullest with room.
SEEDS = 64
#: Up to so many new groups, pairs of them are taken up together.
PAIRED = 24
#: Pods that may be put down or taken up to make a decision better, and for each new group of a large one.
EFFORT, EACH = 20_000, 60

Saved = dict[str, tuple[int, ...]]


def arrange(board: Board, gangs: Sequence[Gang]) -> bool:
    """Put the groups of one pool down together; return whether all found room, else the board is as before.

    Every beginning is tried with all groups near it and with the others free; the best whole arrangement stays.
    """
    ordered = interleaved(gangs)
    best: Saved | None = None
    least = 0.0
    for seed in _seeds(board, ordered):
        for strict in (True, False) if seed else (False,):
            placed = _try(board, ordered, seed, strict)
            if placed is None:
                continue
            cost = board.cost(ordered[0].pool)
            if best is None or cost < least - EPSILON:
                best, least = placed, cost
            _take_up(board, ordered)
    if best is None:
        return False
    _put_back(board, ordered, best)
    return True


def interleaved(gangs: Sequence[Gang]) -> list[Gang]:
    """Return groups of several roles so that each role's share grows evenly: a domain that fills up is balanced."""
    sides: dict[str, list[Gang]] = {}
    for gang in sorted(gangs, key=lambda gang: -gang.pods):
        sides.setdefault(gang.role, []).append(gang)
    keyed = [
        ((index + 0.5) / len(side), -gang.worth, role, index, gang)
        for role, side in sides.items()
        for index, gang in enumerate(side)
    ]
    return [entry[-1] for entry in sorted(keyed, key=lambda entry: entry[:-1])]


def improve(board: Board, gangs: Sequence[Gang], effort: int = EFFORT) -> None:
    """Move the given groups to where the whole is better; ``effort`` is how many pods may be put down or taken up."""
    end = len(board.log) + max(effort, len(gangs) * EACH)
    changed = True
    while changed:
        changed = False
        for better in _tries(board, gangs):
            changed |= better
            if len(board.log) > end:
                return


def _tries(board: Board, gangs: Sequence[Gang]) -> Iterator[bool]:
    """Try what may be better, the cheap things first, and tell of each whether it was; small cases are tried harder."""
    for gang in gangs:
        yield _again(board, [gang])
    if len(gangs) > PAIRED:
        return
    for first, second in combinations(gangs, 2):
        yield _again(board, [first, second])
        yield _again(board, [second, first])
        yield _swap(board, (first, second))
    pools: dict[str, list[Gang]] = {}
    for gang in gangs:
        pools.setdefault(gang.pool, []).append(gang)
    for members in pools.values():
        yield _anew(board, members)
    for one, other in permutations(pools.values(), 2):
        yield _both(board, one, other)
    if len(board.tree.level) <= SEEDS:
        for node, another in combinations(range(len(board.tree.nodes)), 2):
            yield _exchange(board, gangs, node, another)
        for gang in gangs:
            for domain in range(1, len(board.tree.level)):
                yield _force(board, gangs, gang, domain)
    for pairs in combinations(combinations(gangs, 2), 2):
        yield _swap(board, *pairs)


def _again(board: Board, gangs: Sequence[Gang]) -> bool:
    """Take up some groups and put each down where it is best; return whether that was better."""
    before = _total(board, gangs)
    saved = _take_up(board, gangs)
    if all(insert(board, gang) for gang in gangs) and _total(board, gangs) < before - EPSILON:
        return True
    _put_back(board, gangs, saved)
    return False


def _swap(board: Board, *pairs: tuple[Gang, Gang]) -> bool:
    """Let the two groups of each pair, which must ask for the same, change places, one pair after the other."""
    if any(board.shape(one) is not board.shape(other) or _form(one) != _form(other) for one, other in pairs):
        return False
    both = list({gang.name: gang for pair in pairs for gang in pair}.values())
    before = _total(board, both)
    saved = _take_up(board, both)
    turned = dict(saved)
    for one, other in pairs:
        turned[one.name], turned[other.name] = turned[other.name], turned[one.name]
    if all(allowed(board, gang, turned[gang.name]) for gang in both):
        _put_back(board, both, turned)
        if _total(board, both) < before - EPSILON:
            return True
    _put_back(board, both, saved)
    return False


def _form(gang: Gang) -> tuple[int, int]:
    return gang.pods, gang.unit


def _anew(board: Board, gangs: Sequence[Gang]) -> bool:
    """Arrange a pool anew, if that is better."""
    before = _total(board, gangs)
    saved = _take_up(board, gangs)
    if arrange(board, gangs) and _total(board, gangs) < before - EPSILON:
        return True
    _put_back(board, gangs, saved)
    return False


def _both(board: Board, first: Sequence[Gang], second: Sequence[Gang]) -> bool:
    """Arrange two pools anew: the first from every beginning, the second around it; return whether that was better."""
    both = [*first, *second]
    before = _total(board, both)
    saved = _take_up(board, both)
    for seed in _seeds(board, interleaved(first)):
        for strict in (True, False):
            if _try(board, interleaved(first), seed, strict) is None:
                continue
            if arrange(board, second) and _total(board, both) < before - EPSILON:
                return True
            _take_up(board, both)
    _put_back(board, both, saved)
    return False


def _exchange(board: Board, gangs: Sequence[Gang], one: int, other: int) -> bool:
    """Let everything new on two nodes change places, if that is allowed and better."""
    swapped = {one: other, other: one}
    there = [gang for gang in gangs if {one, other}.intersection(board.places[gang.name])]
    if not there or not all(board.shape(gang).eligible[node] for gang in there for node in swapped):
        return False
    before = _total(board, there)
    saved = _take_up(board, there)
    turned = {name: tuple(swapped.get(node, node) for node in at) for name, at in saved.items()}
    if all(allowed(board, gang, turned[gang.name]) for gang in there):
        _put_back(board, there, turned)
        fits = all(free[node] >= 0 for free in board.free.values() for node in swapped)
        if fits and _total(board, there) < before - EPSILON:
            return True
    _put_back(board, there, saved)
    return False


def _force(board: Board, gangs: Sequence[Gang], gang: Gang, domain: int) -> bool:
    """Move a group into a domain although that is worse by itself, let the others follow, and keep it if all is better.

    Groups that are in its way go elsewhere first.
    """
    if domain in board.tree.around[board.tree.common(board.places[gang.name])]:
        return False
    before = _total(board, gangs)
    saved = {other.name: board.places[other.name] for other in gangs}
    board.drop(gang)
    moved: list[Gang] = []
    inside = set(board.tree.members(domain))
    while not insert(board, gang, domain):
        blocking = [other for other in gangs if inside.intersection(board.places.get(other.name, ()))]
        if not blocking:
            break
        moved.append(blocking[0])
        board.drop(blocking[0])
    if gang.name in board.places and all(insert(board, other) for other in moved):
        for other in gangs:
            if other is not gang:
                _again(board, [other])
        if _total(board, gangs) < before - EPSILON:
            return True
    _put_back(board, gangs, saved)
    return False


def _total(board: Board, gangs: Iterable[Gang]) -> float:
    return board.stranding + sum(board.pools[pool].cost() for pool in sorted({gang.pool for gang in gangs}))


def _take_up(board: Board, gangs: Iterable[Gang]) -> Saved:
    """Take the groups that have a place off the board, and return where they were."""
    return {gang.name: board.drop(gang) for gang in gangs if gang.name in board.places}


def _put_back(board: Board, gangs: Sequence[Gang], saved: Saved) -> None:
    """Put the groups where they were, wherever they are now."""
    _take_up(board, gangs)
    for gang in gangs:
        board.put(gang, saved[gang.name])


def _try(board: Board, gangs: Sequence[Gang], seed: int, strict: bool) -> Saved | None:
    """Put the first group, or with ``strict`` all, into a domain and the others where they are best."""
    for index, gang in enumerate(gangs):
        if not insert(board, gang, seed if strict or index == 0 else 0):
            _take_up(board, gangs)
            return None
    return {gang.name: board.places[gang.name] for gang in gangs}


def _seeds(board: Board, gangs: Sequence[Gang]) -> list[int]:
    """Return the domains in which a pool may begin, the whole cluster first."""
    tree, shape, kind = board.tree, board.shape(gangs[0]), board.gpus.get(gangs[0].accelerator)
    if len(tree.level) <= SEEDS or kind is None:
        return [0, *(at for at in range(1, min(len(tree.level), SEEDS + 1)) if shape.slots[at] >= gangs[0].pods)]
    needed = sum(gang.pods * gang.gpus for gang in gangs)
    found = [0]
    for level, domains in enumerate(tree.at[1:], 1):
        if kind.most[level] < needed:
            continue
        able = [at for at in domains if kind.size[at] - kind.used[at] >= needed and shape.slots[at] >= gangs[0].pods]
        if able:
            found.append(min(able, key=lambda at: (kind.size[at] - kind.used[at], at)))
    return found
