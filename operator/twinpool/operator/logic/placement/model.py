"""What placement is asked, and what it answers.

Quantities are whole numbers: CPU in thousandths of a core, memory in bytes, everything else as counted. A group is
named ``namespace/name`` and a pool too, since one cluster's nodes serve all pools.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: Amounts by resource name.
Amounts = Mapping[str, int]

Effect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclass(frozen=True, slots=True)
class Tolerates:
    """A taint that a pod tolerates; an empty key stands for every taint, an empty effect for every effect."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """One requirement on a node's labels, as in ``matchExpressions``; ``field`` looks at the node's name instead."""

    key: str
    operator: str
    values: tuple[str, ...] = ()
    field: bool = False


@dataclass(frozen=True, slots=True)
class Holder:
    """Somebody else's pod on a node."""

    pod: str
    amounts: Amounts


@dataclass(frozen=True, slots=True)
class Node:
    """A node as placement sees it.

    ``holders`` are the pods on it that are not in placement's hands; what groups hold is told by ``placed``.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Amounts = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    ready: bool = True
    cordoned: bool = False
    holders: tuple[Holder, ...] = ()


@dataclass(frozen=True, slots=True)
class Gang:
    """What one serving group asks for: all its pods, or nothing.

    Parameters
    ----------
    pods:
        Pods of the group, rank by rank.
    unit:
        Pods of one tensor-parallel unit: consecutive ranks, a whole share of ``pods``.
    amounts:
        What each pod asks for.
    accelerator:
        Name of the resource in ``amounts`` whose fragments count; empty for a group without GPUs.
    terms:
        Required node affinity: one of the terms must match, each a conjunction; empty is no requirement.
    """

    name: str
    pool: str
    role: str
    pods: int = 1
    unit: int = 1
    amounts: Amounts = field(default_factory=dict)
    accelerator: str = ""
    selector: Mapping[str, str] = field(default_factory=dict)
    terms: tuple[tuple[Match, ...], ...] = ()
    tolerates: tuple[Tolerates, ...] = ()

    @property
    def gpus(self) -> int:
        """Return the GPUs of one pod."""
        return self.amounts.get(self.accelerator, 0)

    @property
    def worth(self) -> int:
        """Return the GPUs of the whole group, by which its discomforts count; a pod without GPUs counts as one."""
        return self.pods * max(1, self.gpus)


@dataclass(frozen=True, slots=True)
class Constraints:
    """What a pool wants of the network, by level names of :mod:`twinpool.core.topology`."""

    #: Level that holds a tensor-parallel unit, and whether nothing else will do.
    tensor: str = "nvlink"
    tensor_required: bool = True
    #: Level that should hold a whole group, and whether nothing else will do.
    expert: str = "rack"
    expert_required: bool = False
    #: Level that prefill and the decode it feeds should share.
    pair: str = "block"
    #: Level whose domains fail together.
    spread: str = "rack"


#: Why a group has no place.
Reason = Literal["NoSuchNode", "NodesUnusable", "NotEnoughFree", "Fragmented", "TopologyUnmet"]


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why one group has no place.

    ``in_vain`` tells that even an empty cluster of these nodes would not hold the group: only other nodes help.
    """

    gang: str
    reason: Reason
    message: str
    remedy: str
    in_vain: bool = False

    def __str__(self) -> str:
        """Return one line: the shortage, then what would help."""
        return f"{self.message} - {self.remedy}"


#: Pairs of nodes whose link was measured too slow; a node alone stands for the links between its own GPUs.
SlowLinks = frozenset[frozenset[str]]

#: The node of each pod of each group, rank by rank.
Places = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The place of every group that has one, and the shortage of every other one."""

    places: Places
    short: Mapping[str, Shortfall] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Growth:
    """How pods of a group that only new nodes can hold are shown to autoscalers.

    ``key`` is the node label whose domain must hold the group, empty for none; ``avoided`` are nodes that are there.
    """

    key: str
    avoided: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return it as it is noted on a StatefulSet."""
        return " ".join((self.key or "-", *self.avoided))

    @classmethod
    def read(cls, text: str) -> Growth:
        """Return what was noted."""
        key, *avoided = text.split() or ["-"]
        return cls("" if key == "-" else key, tuple(avoided))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about one group: a node for each rank, or why there is none yet.

    ``pods`` are the uids of the pods that it is about; others under the same names need another decision. ``growth``
    is there when only new nodes can hold a group of several pods.
    """

    nodes: tuple[str, ...] = ()
    short: Shortfall | None = None
    pods: frozenset[str] = frozenset()
    growth: Growth | None = None
