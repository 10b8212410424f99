"""Which wishes of a pool its layout does not keep, and what each costs, in the order in which they would be kept.

The weights of the objective make that order: a tensor-parallel unit in its domain first, then links that are as fast as
their level promises, then a group in its domain, then KV cache that stays near, then groups that fail apart. Hard rules
are not here: they are kept, or the group has no place.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.operator.logic.placement.score import kept_shares, location, slowed, spanning, units

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twinpool.core.topology import Weights
    from twinpool.operator.logic.placement.model import Constraints, Gang, Places, SlowLinks
    from twinpool.operator.logic.placement.tree import Tree


@dataclass(frozen=True, slots=True)
class Compromise:
    """A wish that is not kept: the field of ``placement`` that says it, how far it is missed, and its weighted cost.

    ``cost`` is in GPUs that are worth nothing, beside the same with the wish kept.
    """

    wish: str
    words: str
    cost: float


@dataclass(frozen=True, slots=True)
class Layout:
    """Groups of one pool, where they lie, and what the pool wants."""

    gangs: Sequence[Gang]
    places: Places
    tree: Tree
    wants: Constraints
    weights: Weights
    slow: SlowLinks = frozenset()

    @property
    def placed(self) -> list[Gang]:
        """Return the groups that have a place."""
        return [gang for gang in self.gangs if gang.name in self.places]

    def name(self, level: int) -> str:
        """Return how a level is called."""
        return self.tree.topology.levels[level].name


def compromises(layout: Layout) -> list[Compromise]:
    """Return the wishes that are not kept, the ones that would be kept first before the others."""
    return [*_tensor(layout), *_slow(layout), *_expert(layout), *_pair(layout), *_spread(layout)]


def _short(gang: Gang) -> str:
    return gang.name.rpartition("/")[2]


def _tensor(layout: Layout) -> Iterator[Compromise]:
    wanted, topology = layout.tree.topology.index(layout.wants.tensor), layout.tree.topology
    for gang in layout.placed:
        if gang.unit == 1:
            continue
        found = [_level(unit, layout.tree) for unit in units(gang, layout.places[gang.name])]
        apart = [level for level in found if level < wanted]
        if apart:
            share = layout.weights.tensor * gang.worth * gang.unit / gang.pods
            cost = share * sum(topology.price(level) - topology.price(wanted) for level in apart)
            what = f"{len(apart)} of {len(found)} tensor-parallel units of {_short(gang)}"
            yield Compromise(
                "tensor", f"{what} span {layout.name(min(apart))}, wanted within {layout.name(wanted)}", cost
            )


def _level(nodes: tuple[str, ...], tree: Tree) -> int:
    return tree.level[location(nodes, tree)]


def _slow(layout: Layout) -> Iterator[Compromise]:
    for gang in layout.placed:
        if cost := slowed(gang, layout.places[gang.name], layout.slow, layout.weights):
            yield Compromise("slow", f"{_short(gang)} runs over a link that was measured too slow", cost)


def _expert(layout: Layout) -> Iterator[Compromise]:
    wanted, topology = layout.tree.topology.index(layout.wants.expert), layout.tree.topology
    for gang in layout.placed:
        nodes = layout.places[gang.name]
        level = _level(nodes, layout.tree)
        if gang.pods > 1 and level < wanted:
            span = spanning(gang, nodes, layout.tree, layout.wants, layout.weights)[1]
            cost = span - gang.worth * layout.weights.span * topology.price(wanted)
            words = f"{_short(gang)} spans {layout.name(level)}, wanted within {layout.name(wanted)}"
            yield Compromise("expert", words, cost)


def _pair(layout: Layout) -> Iterator[Compromise]:
    tree, wanted = layout.tree, layout.tree.topology.index(layout.wants.pair)
    kept = kept_shares(list(layout.gangs), layout.places, tree)
    whole = kept.get(0, 0.0)
    leaves = whole - sum(share for at, share in kept.items() if tree.covers[wanted][at])
    if leaves > 1e-9:
        cost = layout.weights.pair * sum(gang.worth for gang in layout.gangs) * leaves
        yield Compromise("pair", f"{leaves:.0%} of the KV cache leaves its {layout.name(wanted)}", cost)


def _spread(layout: Layout) -> Iterator[Compromise]:
    tree, wanted = layout.tree, layout.tree.topology.index(layout.wants.spread)
    for role in sorted({gang.role for gang in layout.placed}):
        groups = [gang for gang in layout.placed if gang.role == role]
        counts = Counter(
            at
            for gang in groups
            for at in tree.around[location(layout.places[gang.name], tree)]
            if tree.covers[wanted][at]
        )
        domain, most = max(counts.items(), key=lambda item: (item[1], -item[0]), default=(0, 1))
        if most > 1:
            pairs = sum(count * (count - 1) for count in counts.values())
            of_role = [gang for gang in layout.gangs if gang.role == role]
            cost = layout.weights.spread * sum(gang.worth for gang in of_role) * pairs / len(of_role) ** 2
            words = f"{most} of {len(groups)} {role} groups fail with {layout.name(wanted)} {tree.name[domain]}"
            yield Compromise("spread", words, cost)
