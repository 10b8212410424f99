"""What a cluster's network looks like, as data: levels from broad to narrow, each a node label with a link.

A domain is a node's labels from the broadest level down to one, so a rack lies in one block and nowhere else. Nodes
whose labels are missing or contradict those of other nodes are named and left out of that level only: a wrong label
makes placement less informed, never wrong. The first level is always the whole cluster, the last always the node.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinpool.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CLUSTER, HOST = "cluster", "host"

#: The levels that constraints may name, from broad to narrow.
NAMES = ("zone", "fabric", "block", "rack", "nvlink", HOST)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the network.

    Parameters
    ----------
    name:
        One of :data:`NAMES`, or ``cluster``.
    labels:
        Node labels that name the domain; the first that a node has counts (tools renamed theirs).
    bandwidth:
        Bytes/s in one direction between two GPUs whose narrowest common domain is at this level.
    latency:
        Seconds before the first byte of a message between them.
    measured:
        Whether both are what was measured, instead of what was said or assumed.
    """

    name: str
    labels: tuple[str, ...]
    bandwidth: float
    latency: float
    measured: bool = False


#: Bytes/s and seconds per level. The data sheets' peaks for an NVLink of the H100 generation (900 GB/s in both
#: directions together) and for one 400 Gbit/s adapter for each GPU; what lies beyond a rack is an assumption: each step
#: halves what a GPU gets. What is known better replaces them (:mod:`twinpool.core.links`).
LINKS: Mapping[str, tuple[float, float]] = {
    CLUSTER: (3.125e9, 1e-3),
    "zone": (6.25e9, 2e-5),
    "fabric": (12.5e9, 1e-5),
    "block": (25e9, 6e-6),
    "rack": (50e9, 3e-6),
    "nvlink": (450e9, 1e-6),
    HOST: (450e9, 1e-6),
}


@dataclass(frozen=True, slots=True)
class Topology:
    """The levels of a cluster from broad to narrow, from ``cluster`` to ``host``."""

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        """Refuse levels out of order.

        Raises
        ------
        InvalidValue
            When a name is unknown or twice there, the order is not from broad to narrow, or a level has no label.
        """
        order = (CLUSTER, *NAMES)
        names = [level.name for level in self.levels]
        if unknown := [name for name in names if name not in order]:
            raise InvalidValue(f"topology level {unknown[0]!r} is unknown", f"use {', '.join(NAMES)}")
        if names != sorted(set(names), key=order.index) or names[:1] != [CLUSTER] or names[-1:] != [HOST]:
            raise InvalidValue(f"the topology's levels are {', '.join(names)}", f"order them so: {' > '.join(NAMES)}")
        if bare := [level.name for level in self.levels[1:-1] if not level.labels]:
            raise InvalidValue(f"topology level {bare[0]} has no node label", "name the label that its domains have")
        if bad := [level.name for level in self.levels if level.bandwidth <= 0 or level.latency < 0]:
            raise InvalidValue(f"the link of topology level {bad[0]} is impossible", "give a bandwidth above 0")

    @property
    def host(self) -> int:
        """Return the index of the narrowest level."""
        return len(self.levels) - 1

    def index(self, name: str) -> int:
        """Return the index of a level, or of the next narrower one that the cluster has.

        A constraint on a level that the cluster does not have is kept by what is certainly inside it.

        Raises
        ------
        InvalidValue
            When there is no level of that name.
        """
        if name not in NAMES:
            raise InvalidValue(f"topology level {name!r} is unknown", f"use {', '.join(NAMES)}")
        narrower = NAMES[NAMES.index(name) :]
        return min(index for index, level in enumerate(self.levels) if level.name in narrower)

    def price(self, index: int) -> float:
        """Return the time of a byte over links of a level, as a share of the slowest link's; in (0, 1].

        Measured figures may make a broader level the faster one; being close never costs more here.
        """
        slowest = min(level.bandwidth for level in self.levels)
        return slowest / max(level.bandwidth for level in self.levels[: index + 1])


def topology(labels: Mapping[str, tuple[str, ...]]) -> Topology:
    """Return the topology whose levels have these node labels, with the links of :data:`LINKS`.

    Raises
    ------
    InvalidValue
        When a level is unknown or has no label.
    """
    if unknown := [name for name in labels if name not in NAMES[:-1]]:
        raise InvalidValue(f"topology level {unknown[0]!r} is unknown", f"use {', '.join(NAMES[:-1])}")
    named = [(name, labels[name]) for name in NAMES if name in labels]
    return Topology(tuple(Level(name, keys, *LINKS[name]) for name, keys in ((CLUSTER, ()), *named, (HOST, ()))))


_ZONE = ("topology.kubernetes.io/zone",)
_CLIQUE = ("nvidia.com/gpu.clique",)

#: Node labels per level by where the cluster runs. Sources: the clouds' and NVIDIA's documentation of their labels;
#: topograph renamed its own in 1.0, both generations count.
PRESETS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "eks": {
        "zone": _ZONE,
        "fabric": ("topology.k8s.aws/network-node-layer-1",),
        "block": ("topology.k8s.aws/network-node-layer-2",),
        "rack": ("topology.k8s.aws/network-node-layer-3",),
        "nvlink": ("topology.k8s.aws/ultraserver-id", *_CLIQUE),
    },
    "gke": {
        "zone": _ZONE,
        "block": ("cloud.google.com/gce-topology-block",),
        "rack": ("cloud.google.com/gce-topology-subblock",),
        "nvlink": _CLIQUE,
    },
    "oke": {
        "zone": _ZONE,
        "fabric": ("oci.oraclecloud.com/rdma.hpc_island_id",),
        "block": ("oci.oraclecloud.com/rdma.network_block_id",),
        "rack": ("oci.oraclecloud.com/rdma.local_block_id",),
        "nvlink": _CLIQUE,
    },
    # Azure labels no fabric; InfiniBand reaches the machines of one node pool.
    "azure": {"zone": _ZONE, "block": ("kubernetes.azure.com/agentpool",), "nvlink": _CLIQUE},
    "topograph": {
        "zone": _ZONE,
        "fabric": ("fabric.topograph.run/tier-2", "network.topology.nvidia.com/core"),
        "block": ("fabric.topograph.run/tier-1", "network.topology.nvidia.com/spine"),
        "rack": ("fabric.topograph.run/tier-0", "network.topology.nvidia.com/leaf"),
        "nvlink": ("accelerator.topograph.run/domain", "network.topology.nvidia.com/accelerator", *_CLIQUE),
    },
    "clique": {"zone": _ZONE, "nvlink": _CLIQUE},
    "hostname": {},
}


def _every_label() -> Mapping[str, tuple[str, ...]]:
    """Return for each level the labels of all presets: what a cluster does not have does no harm."""
    found: dict[str, tuple[str, ...]] = {}
    for name in NAMES[:-1]:
        keys = [key for preset in PRESETS.values() for key in preset.get(name, ())]
        found[name] = tuple(dict.fromkeys(keys))
    return found


#: Key of a node label: a name, and a DNS prefix before it where it has one.
_LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")

#: The preset that takes whatever label a cluster has.
AUTO = "auto"


def preset(name: str) -> Topology:
    """Return the topology of a preset, or of all presets together (``auto``).

    Raises
    ------
    InvalidValue
        When there is no such preset.
    """
    if name == AUTO:
        return topology(_every_label())
    if name not in PRESETS:
        raise InvalidValue(f"there is no topology {name!r}", f"use {', '.join((AUTO, *PRESETS))}")
    return topology(PRESETS[name])


def parse(text: str) -> Topology:
    """Return the topology that a flag names: a preset, or levels with labels of one's own, ``rack=a|b,block=c``.

    Of several labels of a level, the first that a node has counts.

    Raises
    ------
    InvalidValue
        When there is no such preset or level, a level is named twice, or a label cannot be one.
    """
    if "=" not in text:
        return preset(text)
    found: dict[str, tuple[str, ...]] = {}
    for entry in text.split(","):
        name, _, labels = (part.strip() for part in entry.partition("="))
        keys = tuple(label.strip() for label in labels.split("|"))
        if bad := [key for key in keys if not _LABEL.fullmatch(key)]:
            raise InvalidValue(f"topology level {name!r} has no usable label {bad[0]!r}", "write LEVEL=LABEL|LABEL,...")
        if name in found:
            raise InvalidValue(f"topology level {name!r} is named twice", "put its labels together: rack=a|b")
        found[name] = keys
    return topology(found)


@dataclass(frozen=True, slots=True)
class Weights:
    """What placement pays for each thing it would rather not do, all in GPUs that are worth nothing.

    ``docs/placement.md`` says why; every term is a share between 0 and 1 times GPUs times its weight.
    """

    #: A pool's KV, by the time it takes compared with all of it over the slowest link.
    handoff: float = 0.3
    #: A pool's KV that leaves the level of ``pair``.
    pair: float = 0.1
    #: A tensor-parallel unit over several nodes, by the price of its widest link.
    tensor: float = 1.0
    #: A group over several nodes, by the price of its widest link.
    span: float = 0.3
    #: A group over several nodes that leaves the level of ``expert``.
    outside: float = 0.2
    #: A group over a link that was measured far below what its level promises.
    slow: float = 1.0
    #: A role's share that is expected to go with one failure domain, above the least that is possible.
    spread: float = 0.2
    #: A free GPU in a domain of a level that is no longer entirely free: less room for the next large group.
    stranded: Mapping[str, float] = field(default_factory=lambda: {HOST: 0.25, "nvlink": 0.05, "rack": 0.02})


@dataclass(frozen=True, slots=True)
class Complaint:
    """A node whose labels cannot be used at one level."""

    node: str
    level: str
    problem: str


#: A node's domain at each level, None where it is left out.
Path = tuple[str | None, ...]


def shared(one: Path, other: Path) -> int:
    """Return the index of the narrowest level whose domain two nodes share; a domain is its whole path from above."""
    found = 0
    for index, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        if mine != theirs:
            break
        found = index if mine is not None else found
    return found


def paths(topology: Topology, nodes: Mapping[str, Mapping[str, str]]) -> tuple[dict[str, Path], list[Complaint]]:
    """Return the domains of each node, and what is wrong with labels; ``nodes`` are labels by node name.

    A level that no node is labelled for is not complained about: the cluster does not have it.
    """
    keys = [level.labels for level in topology.levels[1:-1]]
    named = {name: _named(keys, name, labels) for name, labels in nodes.items()}
    complaints: list[Complaint] = []
    for index, level in enumerate(topology.levels[1:-1], 1):
        lacking = sorted(name for name, path in named.items() if path[index] is None)
        if len(lacking) < len(named):
            text = f"has no label {' or '.join(level.labels)}"
            complaints += [Complaint(name, level.name, text) for name in lacking]
        for name, text in _contradicting(topology, named, index):
            complaints.append(Complaint(name, level.name, text))
            named[name][index] = None
    return {name: tuple(path) for name, path in named.items()}, complaints


def _named(keys: Sequence[tuple[str, ...]], name: str, labels: Mapping[str, str]) -> list[str | None]:
    """Return what the labels of a node say, level by level; an empty label says nothing.

    Written for speed: it is most of what one more pool in a large cluster costs.
    """
    path: list[str | None] = [CLUSTER]
    for choices in keys:
        for key in choices:
            if value := labels.get(key):
                path.append(value)
                break
        else:
            path.append(None)
    path.append(name)
    return path


def _contradicting(topology: Topology, named: Mapping[str, list[str | None]], index: int) -> list[tuple[str, str]]:
    """Return the nodes that put a domain of this level elsewhere than most nodes do, and in which words to say so.

    Broader levels were settled before; the broadest one that differs tells.
    """
    around: dict[str, list[str | None]] = {}
    odd: set[str] = set()
    for path in named.values():
        if (domain := path[index]) is not None and around.setdefault(domain, path[1:index]) != path[1:index]:
            odd.add(domain)
    members: dict[str, list[str]] = {}
    for name, path in named.items() if odd else ():
        members.setdefault(path[index] or "", []).append(name)
    found: list[tuple[str, str]] = []
    for domain in sorted(odd):
        names = members[domain]
        for broader in range(1, index):
            count = Counter(value for name in names if (value := named[name][broader]) is not None)
            if len(count) < 2:
                continue
            most = min(count, key=lambda value: (-count[value], value))
            wrong = [name for name in names if named[name][broader] not in (None, most)]
            level, outer = topology.levels[index].name, topology.levels[broader].name
            found += [
                (name, f"is in {level} {domain}, which most nodes put into {outer} {most}, and in {outer} {where}")
                for name in wrong
                if (where := named[name][broader])
            ]
            names = [name for name in names if name not in set(wrong)]
    return sorted(found)
