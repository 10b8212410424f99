"""What a placement is worth beside the objective: figures that other systems are judged by too."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from bench.placement.baselines import Ground
from bench.placement.cases import LABELS, Case, large
from twinpool.core.topology import Weights
from twinpool.operator.logic.placement.place import place
from twinpool.operator.logic.placement.score import kept_shares, score

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from bench.placement.baselines import Placed
    from twinpool.operator.logic.placement.tree import Tree


@dataclass(frozen=True)
class Quality:
    """Figures of one placement; ``objective`` is only comparable between placements of the same groups."""

    objective: float
    placed: int
    #: Mean bandwidth of the links that KV takes under the best pairing, in bytes/s.
    bandwidth: float
    #: Share of KV that leaves its block.
    crossing: float
    #: Mean share of a role in the rack that has most of it.
    exposed: float
    #: Free GPUs on nodes that are partly used.
    stranded: float
    #: Groups of 32 GPUs in one rack that could still be placed afterwards.
    later: int

    def beats(self, other: Quality) -> bool:
        """Return whether this is at least as good in everything but the objective, and better in something."""
        signs = (1, 1, -1, -1, -1, 1)
        pairs = zip(astuple(self)[1:], astuple(other)[1:], signs, strict=True)
        gains = [sign * (mine - theirs) for mine, theirs, sign in pairs]
        return all(gain >= 0 for gain in gains) and any(gain > 1e-9 for gain in gains)


def case(random: Random, nodes: int) -> Case:
    """Return a large case in which every rule can place something: a group for every other rack at most."""
    return large(random, nodes, pools=nodes // 80, gangs=nodes // 320)


def ours(ground: Ground) -> Placed:
    """Place with Twinpool."""
    question = ground.case
    return dict(place(question.groups, question.nodes, {}, question.topology, question.constraints).places)


def quality(question: Case, rule: Callable[[Ground], Placed], random: Random) -> Quality:
    """Return the figures of one rule's placement."""
    ground = Ground(question, random)
    placed = rule(ground)
    bandwidth, crossing = _links(question, placed, ground.tree)
    used = Ground(question, random)
    for gang in question.groups:
        for name in placed.get(gang.name, ()):
            used.free[used.tree.number[name]] -= gang.gpus
    return Quality(
        objective=score(question.groups, placed, used.tree, question.constraints, Weights()).total,
        placed=len(placed),
        bandwidth=bandwidth,
        crossing=crossing,
        exposed=_exposed(question, placed, ground.tree),
        stranded=sum(free for free, size in zip(used.free, used.size, strict=True) if free < size),
        later=_later(used),
    )


def _links(question: Case, placed: Placed, tree: Tree) -> tuple[float, float]:
    """Return the mean bandwidth over the pools' KV, and the share that leaves its block."""
    block = question.topology.index("block")
    bandwidth, crossing, pools = 0.0, 0.0, 0
    for name in question.constraints:
        kept = kept_shares([gang for gang in question.groups if gang.pool == name], placed, tree)
        if not kept.get(0):
            continue
        pools += 1
        for at, share in kept.items():
            inside = sum(kept.get(child, 0.0) for child in tree.children[at])
            bandwidth += (share - inside) / kept[0] * question.topology.levels[tree.level[at]].bandwidth
        crossing += 1 - sum(share for at, share in kept.items() if tree.covers[block][at]) / kept[0]
    return bandwidth / max(1, pools), crossing / max(1, pools)


def _exposed(question: Case, placed: Placed, tree: Tree) -> float:
    """Return the mean share of the roles with several groups that one rack holds."""
    racks: dict[tuple[str, str], Counter[str]] = {}
    for gang in question.groups:
        for name in placed.get(gang.name, ()):
            where = tree.nodes[tree.number[name]].labels[LABELS["rack"]]
            racks.setdefault((gang.pool, gang.role), Counter())[where] += 1
    shares = [max(counts.values()) / counts.total() for counts in racks.values() if counts.total() > 1]
    return statistics.fmean(shares) if shares else 0.0


def _later(ground: Ground) -> int:
    """Return how many groups of four whole nodes in one rack still fit."""
    racks = ground.tree.at[ground.tree.topology.index("rack")]
    return sum(sum(ground.free[node] // 8 for node in ground.tree.members(at)) // 4 for at in racks)
