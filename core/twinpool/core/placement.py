"""The ``placement`` block of a pool: who chooses the nodes, and what must or should lie together or apart."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from twinpool.core.fields import Part

#: Levels of the network, from broad to narrow; which node label each is, the operator is told (``--topology``).
LevelName = Literal["zone", "fabric", "block", "rack", "nvlink", "host"]

#: Who chooses the nodes of a role's pods.
Mode = Literal["pin", "affinity"]


class TensorPlacement(Part):
    """Where the ranks of one tensor-parallel unit lie when they are on several nodes."""

    within: LevelName = Field("nvlink", description="Level of the network whose domain holds the unit.")
    required: bool = Field(True, description="Whether a group rather waits than lies apart.")


class ExpertPlacement(Part):
    """Where a whole group lies when it is on several nodes."""

    within: LevelName = Field("rack", description="Level of the network whose domain should hold the group.")
    required: bool = Field(False, description="Whether a group rather waits than lies apart.")


class PairPlacement(Part):
    """Where prefill lies, seen from the decode that it feeds."""

    within: LevelName = Field("block", description="Level of the network that the KV cache should not leave.")


class SpreadPlacement(Part):
    """How far the groups of a role lie apart."""

    across: LevelName = Field("rack", description="Level whose domains fail together.")


class Placement(Part):
    """Who chooses the nodes of new groups, and by what; groups that run are not moved by an edit."""

    mode: Mode = Field(
        "pin",
        description="pin: the operator chooses a node for every pod of a group at once, or says what is short; "
        "affinity: kube-scheduler chooses, told which pods should be near. Pin becomes affinity where the operator may "
        "not read nodes, and for pods with another scheduler or with resource claims; status.placement says which.",
    )
    tensor: TensorPlacement = Field(default_factory=TensorPlacement, description="Ranks that share every layer.")
    expert: ExpertPlacement = Field(default_factory=ExpertPlacement, description="All ranks of a group.")
    pair: PairPlacement = Field(default_factory=PairPlacement, description="Prefill and the decode that it feeds.")
    spread: SpreadPlacement = Field(default_factory=SpreadPlacement, description="Groups of one role.")
    compute_domain: Literal["auto", "never"] = Field(
        "auto",
        description="auto: each new group of several nodes with NVIDIA GPUs gets a ComputeDomain, which opens NVLink "
        "between nodes, where the cluster serves resource.nvidia.com/v1beta1; status.computeDomain says whether.",
    )
