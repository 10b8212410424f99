"""What a layout costs in seconds: tensor ranks and stages per token, KV per handoff, over the levels that they got.

The objective compares layouts; this says what they mean to a request. Estimates: the model's bytes over data sheets and
the topology's levels, with nothing overlapped. Nothing here decides anything.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.core.communication import Wire, pipeline_seconds, tensor_seconds
from twinpool.core.kv import kv_bytes_per_token_per_gpu
from twinpool.core.timing import Link, transfer_seconds
from twinpool.core.topology import HOST, Topology
from twinpool.operator.logic.placement.score import kept_shares, location, units

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twinpool.core.accelerators import Accelerator
    from twinpool.core.kv import ModelShape
    from twinpool.core.sizing import Split, Workload
    from twinpool.operator.logic.placement.model import Constraints, Gang, Places
    from twinpool.operator.logic.placement.tree import Tree

#: Tokens of a KV block (vLLM's default on GPUs): each is a piece of its own in a transfer.
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Served:
    """What is served how: a model, the split of each role, its hardware, and the requests that it is asked about."""

    shape: ModelShape
    gpu: Accelerator
    splits: Mapping[str, Split]
    work: Workload

    def wire(self, topology: Topology, level: int) -> Wire:
        """Return what two GPUs have between them at a level.

        What was measured, or the data sheet near by, and further out no more than the adapter gives.
        """
        found = topology.levels[level]
        if found.measured:
            return Wire(found.bandwidth, found.latency)
        near = found.name in ("nvlink", HOST)
        bandwidth = self.gpu.inside if near else min(found.bandwidth, self.gpu.across)
        return Wire(bandwidth, found.latency)

    def tokens(self, role: str) -> int:
        """Return the tokens of one step: a prompt, or one token of each request."""
        return self.work.prompt if role == "prefill" else self.work.concurrency

    def per(self, role: str) -> int:
        """Return by what a step's seconds are divided: prompt tokens share a step, written tokens each wait for one."""
        return self.work.prompt if role == "prefill" else 1


@dataclass(frozen=True, slots=True)
class RuleCost:
    """What ``groups`` of a role pay in one way: seconds per token at the level they got, and over the slowest links."""

    rule: str
    role: str
    level: str
    wanted: str
    groups: int
    seconds: float
    anywhere: float


@dataclass(frozen=True, slots=True)
class HandoffCost:
    """The share of handoffs whose KV crosses a level, and the seconds of one."""

    level: str
    share: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What a layout costs in seconds."""

    rules: tuple[RuleCost, ...]
    handoffs: tuple[HandoffCost, ...]
    #: Level of ``pair``, and the seconds of a handoff over it and over the slowest links.
    wanted: str
    at_wanted: float
    anywhere: float
    #: Share of each role's groups that goes with the worst domain of ``spread``.
    lost: Mapping[str, float]
    spread: str

    @property
    def handoff(self) -> float:
        """Return the mean seconds of a handoff; 0 without any."""
        share = sum(item.share for item in self.handoffs)
        return sum(item.share * item.seconds for item in self.handoffs) / share if share else 0.0


def costs(gangs: Sequence[Gang], places: Places, tree: Tree, wants: Constraints, served: Served) -> Costs:
    """Return what the placed groups of one pool cost."""
    topology = tree.topology
    placed = [gang for gang in gangs if gang.name in places]
    found: Counter[tuple[str, str, int]] = Counter()
    for gang in placed:
        split, nodes = served.splits[gang.role], places[gang.name]
        if split.tensor > 1:
            level = min(_level(unit, tree) for unit in units(gang, nodes))
            found["tensor", gang.role, level] += 1
        if split.pipeline > 1:
            found["span", gang.role, _level(nodes, tree)] += 1
    pair = topology.index(wants.pair)
    rules = (_rule(topology, wants, served, *key, groups) for key, groups in sorted(found.items()))
    return Costs(
        rules=tuple(rules),
        handoffs=tuple(_handoffs(list(gangs), places, tree, served)),
        wanted=topology.levels[pair].name,
        at_wanted=handoff_seconds(served, served.wire(topology, pair)),
        anywhere=handoff_seconds(served, served.wire(topology, 0)),
        lost=_lost(placed, places, tree, topology.index(wants.spread)),
        spread=topology.levels[topology.index(wants.spread)].name,
    )


def handoff_seconds(served: Served, wire: Wire) -> float:
    """Return the seconds in which each GPU of a decode group pulls its part of a prompt's KV.

    One piece for keys and one for values of each layer and block, one for a latent (vLLM's NIXL layout).
    """
    shape, split = served.shape, served.splits["decode"]
    tokens = served.work.prompt
    size = kv_bytes_per_token_per_gpu(shape, split.tensor) * tokens // split.pipeline
    kinds = 1 if shape.latent is not None else 2
    pieces = kinds * shape.layers * -(-tokens // _BLOCK) // split.pipeline
    return transfer_seconds(Link(bandwidth=wire.bandwidth), size, pieces) + wire.latency


def _level(nodes: Sequence[str], tree: Tree) -> int:
    return tree.level[location(tuple(nodes), tree)]


def _rule(
    topology: Topology, wants: Constraints, served: Served, rule: str, role: str, level: int, groups: int
) -> RuleCost:
    names = [item.name for item in topology.levels]
    wanted = topology.index(wants.tensor if rule == "tensor" else wants.expert)
    split, tokens = served.splits[role], served.tokens(role)

    def seconds(at: int) -> float:
        wire = served.wire(topology, at)
        if rule == "tensor":
            return tensor_seconds(served.shape, tokens, split.tensor, wire) / served.per(role)
        return pipeline_seconds(served.shape, tokens, split.pipeline, wire) / served.per(role)

    return RuleCost(rule, role, names[level], names[wanted], groups, seconds(level), seconds(0))


def _handoffs(gangs: list[Gang], places: Places, tree: Tree, served: Served) -> list[HandoffCost]:
    """Return by level what crosses it: what a domain keeps, less what the domains inside it keep."""
    kept = kept_shares(gangs, places, tree)
    shares = [0.0] * len(tree.topology.levels)
    for domain, share in kept.items():
        shares[tree.level[domain]] += share - sum(kept.get(child, 0.0) for child in tree.children[domain])
    topology = tree.topology
    return [
        HandoffCost(topology.levels[level].name, share, handoff_seconds(served, served.wire(topology, level)))
        for level, share in enumerate(shares)
        if share > 1e-9
    ]


def _lost(placed: Sequence[Gang], places: Places, tree: Tree, level: int) -> dict[str, float]:
    counts: dict[str, Counter[int]] = {}
    for gang in placed:
        around = tree.around[location(places[gang.name], tree)]
        counts.setdefault(gang.role, Counter()).update(at for at in around if tree.covers[level][at])
    groups = Counter(gang.role for gang in placed)
    return {role: max(found.values(), default=0) / groups[role] for role, found in sorted(counts.items())}
