"""What a pool says about itself; derived from its live children, written by the operator alone."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from twinpool.core.fields import Part
from twinpool.core.objectives import Objectives
from twinpool.core.scaling import ScalingStatus

#: Groups that a status tells the progress of.
MAX_LOADING = 16


class Condition(Part):
    """One statement about the pool, as in ``metav1.Condition``."""

    type: str = Field(max_length=316, description="What the statement is about.")
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    reason: str = Field(min_length=1, max_length=1024, description="Why, in one CamelCase word.")
    message: str = Field(max_length=32768, description="The cause and the next step, for people.")
    last_transition_time: str = Field(
        description="When the status last changed.", json_schema_extra={"format": "date-time"}
    )
    observed_generation: int = Field(0, ge=0, description="Generation of the pool that the statement is about.")


class RoleStatus(Part):
    """How many groups of a role there are."""

    desired: int = Field(0, description="Groups wanted.")
    created: int = Field(0, description="Groups that exist.")
    ready: int = Field(0, description="Groups whose engines are ready on every pod.")
    routable: int = Field(0, description="Groups that serve: ready, and listed by every router.")
    updated: int = Field(0, description="Groups of the newest revision.")
    summary: str = Field("0/0", description="Routable and wanted, for the table of kubectl get.")


class SlowLink(Part):
    """A link between two nodes, or between the GPUs of one, that was measured far below what its level promises."""

    nodes: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)] = Field(
        description="The nodes; one alone stands for the links between its own GPUs."
    )
    level: str = Field(max_length=63, description="The narrowest level of the network that both are in.")
    measured: int = Field(ge=0, description="What the slowest pair of ranks got, in bytes per second.")
    promised: int = Field(ge=0, description="What the level promises, in bytes per second.")
    since: str = Field(description="When it was measured last.", json_schema_extra={"format": "date-time"})


class LinkStatus(Part):
    """What preflights of the pool's groups measured of the links of one level of the network."""

    level: str = Field(max_length=63, description="The level.")
    pairs: int = Field(ge=1, description="Pairs of ranks that were measured.")
    bandwidth: int = Field(ge=0, description="Their median, in bytes per second.")
    latency: float = Field(ge=0, description="Their median, in seconds.")
    configured: int = Field(ge=0, description="What the operator was told or assumes of it, in bytes per second.")
    since: str = Field(description="When it was measured last.", json_schema_extra={"format": "date-time"})


class LoadingStatus(Part):
    """How far the weights of a starting group are: those of its pod that has most to do."""

    group: str = Field(max_length=63, description="The group.")
    stage: str = Field(max_length=32, description="waiting (for another pod of the node), downloading or checking.")
    bytes: int = Field(ge=0, description="Bytes that are there, or were checked.")
    total: int = Field(ge=0, description="Bytes in all; 0 while that is not known.")


class InferencePoolStatus(Part):
    """What is, derived from the live children of the pool."""

    observed_generation: int = Field(0, description="Generation of the pool that this status is about.")
    conditions: Annotated[
        tuple[Condition, ...],
        Field(
            max_length=32,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = Field((), description="Statements about the pool.")
    prefill: RoleStatus | None = Field(None, description="Prefill groups.")
    decode: RoleStatus | None = Field(None, description="Decode groups.")
    router: RoleStatus | None = Field(None, description="Router pods.")
    ratio: str | None = Field(None, description="Routable prefill to routable decode groups in lowest terms.")
    target_ratio: str | None = Field(None, description="Wanted prefill to wanted decode groups in lowest terms.")
    revision: str | None = Field(None, description="Revision of the newest pods.")
    serving_revision: str | None = Field(
        None, description="Revision of most routable decode groups; another one than revision during a rollout."
    )
    selector: str | None = Field(
        None, description="Labels of the pods that autoscalers measure: the leaders of decode groups."
    )
    placement: str | None = Field(
        None, description="How the nodes of new groups are chosen: pin or affinity; absent without spec.placement."
    )
    compute_domain: str | None = Field(
        None,
        description="What new groups of several nodes get: PerGroup (one ComputeDomain each), or why none: NotServed "
        "by this cluster, NotAllowed to the operator, Never (as asked), OwnClaims (pods have resource claims of the "
        "user's); absent without spec.placement and where no group spans nodes.",
    )
    slow_links: Annotated[tuple[SlowLink, ...], Field(max_length=16)] | None = Field(
        None,
        description="Links that were measured too slow within the last day, also of groups that are gone: new groups "
        "avoid them.",
    )
    links: Annotated[tuple[LinkStatus, ...], Field(max_length=8)] | None = Field(
        None,
        description="Links by level as preflights measured them, also those of groups that went within the last day. "
        "From three pairs on, over all pools, placement counts with them instead of what the operator was told.",
    )
    loading: Annotated[tuple[LoadingStatus, ...], Field(max_length=MAX_LOADING)] | None = Field(
        None, description="Starting groups whose weights are fetched or checked, the slowest first."
    )
    endpoint: str | None = Field(None, description="URL of the pool inside the cluster.")
    objectives: Objectives | None = Field(None, description="The objectives that the pool was given.")
    scaling: ScalingStatus | None = Field(None, description="What spec.scaling has decided.")
