"""Clusters and pools to place, made from a seed: small ones that an exact solver can do, and large ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinpool.core.topology import PRESETS, topology
from twinpool.operator.logic.placement.model import Constraints, Gang, Holder, Node

if TYPE_CHECKING:
    from random import Random

    from twinpool.core.topology import Topology

GPU = "nvidia.com/gpu"

LABELS = {
    "zone": "topology.kubernetes.io/zone",
    "block": "network.topology.nvidia.com/spine",
    "rack": "network.topology.nvidia.com/leaf",
    "nvlink": "nvidia.com/gpu.clique",
}


@dataclass(frozen=True)
class Case:
    """One question to placement."""

    groups: tuple[Gang, ...]
    nodes: tuple[Node, ...]
    constraints: dict[str, Constraints]
    placed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    topology: Topology = field(default_factory=lambda: topology(PRESETS["topograph"]))


def node(
    name: str, block: str, rack: str, clique: str | None, gpus: int, held: int = 0, zone: str | None = None
) -> Node:
    """Return a node with labels of topograph's first generation; ``held`` GPUs belong to somebody else."""
    labels = {LABELS["block"]: block, LABELS["rack"]: rack}
    if clique is not None:
        labels[LABELS["nvlink"]] = clique
    if zone is not None:
        labels[LABELS["zone"]] = zone
    holders = (Holder(f"other/{name}", {GPU: held, "pods": 1}),) if held else ()
    return Node(name, labels, {GPU: gpus, "pods": 64}, holders=holders)


def pool(
    name: str, prefill: int, decode: int, gpus: int, pods: int = 1, unit: int = 1, prefill_gpus: int | None = None
) -> list[Gang]:
    """Return the groups of a pool: prefill groups of one pod, decode groups of ``pods`` pods."""
    makers = [
        Gang(f"{name}-prefill-{n}", name, "prefill", amounts={GPU: prefill_gpus or gpus, "pods": 1}, accelerator=GPU)
        for n in range(prefill)
    ]
    takers = [
        Gang(f"{name}-decode-{n}", name, "decode", pods, unit, {GPU: gpus, "pods": 1}, GPU) for n in range(decode)
    ]
    return makers + takers


def small(random: Random) -> Case:
    """Return a cluster of at most 12 nodes and some pools, a third of them more than it can hold."""
    size = random.choice((2, 4, 8))
    nodes: list[Node] = []
    for block in range(random.randint(1, 2)):
        for rack in range(random.randint(1, 4)):
            cliques = random.random() < 0.6
            for _ in range(random.randint(1, 4)):
                if len(nodes) < 12:
                    held = random.choice((0, 0, 0, 1, size // 2, size))
                    clique = f"c{block}{rack}{random.randint(0, 1)}" if cliques else None
                    nodes.append(node(f"n{len(nodes)}", f"b{block}", f"r{block}{rack}", clique, size, held))
    groups: list[Gang] = []
    constraints = {}
    for index in range(random.choice((1, 2, 2, 3))):
        name, gpus = f"p{index}", random.choice([count for count in (1, 2, 4, 8) if count <= size])
        pods = random.choice((1, 1, 1, 1, 2, 3, 4)) if gpus == size else 1
        unit = random.choice([count for count in (1, 2, 3, 4) if pods % count == 0])
        prefill, decode = random.choice(((0, 1), (0, 3), (1, 1), (1, 2), (1, 3), (2, 2), (2, 1)))
        groups += pool(name, prefill, decode, gpus, pods, unit, prefill_gpus=random.choice((gpus, max(1, gpus // 2))))
        constraints[name] = Constraints(
            tensor_required=random.random() < 0.7,
            expert=random.choice(("rack", "block")),
            expert_required=random.random() < 0.2,
            pair=random.choice(("block", "rack")),
            spread=random.choice(("rack", "host", "block")),
        )
    return Case(tuple(groups), tuple(nodes), constraints)


def large(random: Random, nodes: int = 5000, pools: int = 200, gangs: int = 16, used: float = 0.6) -> Case:
    """Return a cluster of nodes with 8 GPUs, 8 nodes to a rack and 16 racks to a block, part of them used by others.

    ``pools`` ask for one prefill and three decode groups of 8 GPUs each, ``gangs`` for 32 GPUs in one group.
    """
    made = []
    for index in range(nodes):
        block, rack = index // 128, index // 8
        held = 8 if random.random() < used * 0.85 else random.choice((0, 0, 1, 2, 4)) if random.random() < used else 0
        made.append(node(f"n{index}", f"b{block}", f"r{rack}", None, 8, held, f"z{block % 3}"))
    groups: list[Gang] = []
    for index in range(pools):
        groups += pool(f"p{index}", 1, 3, 8)
    for index in range(gangs):
        groups += pool(f"g{index}", 0, 1, 8, pods=4)
    return Case(tuple(groups), tuple(made), {group.pool: Constraints() for group in groups})
