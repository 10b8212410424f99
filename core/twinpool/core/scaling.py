"""The ``scaling`` block of a pool, and what its status says of it: the numbers of groups follow the arriving work."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from twinpool.core.fields import Duration, Part, rule, rules

#: Decisions that the status remembers.
MAX_DECISIONS = 10
#: Longest reason of one.
MAX_WORDS = 512


class RoleScaling(Part):
    """How few and how many groups of a role there may be."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("self.min <= self.max", "min must not be above max; lower min or raise max", field_path=".min")
        )
    )

    min: int = Field(
        1,
        ge=0,
        le=1000,
        description="Fewest groups; 0 lets the role go while nobody asks, and come back when somebody does.",
    )
    max: int = Field(ge=1, le=1000, description="Most groups.")


class Stabilization(Part):
    """How long a need must last before it is followed."""

    scale_in: Duration = Field(
        "5m", description="A group goes when no need of this long asked for it. Longer than an engine takes to load."
    )
    scale_out: Duration = Field("5s", description="A group comes when all needs of this long asked for it.")


class Scaling(Part):
    """Numbers of groups that follow the work which arrives at the routers; replicas is then only the first number."""

    prefill: RoleScaling = Field(description="Bounds of the prefill groups.")
    decode: RoleScaling = Field(description="Bounds of the decode groups.")
    gpu_budget: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="Most GPUs of all groups together at any moment, also while groups come and go or a revision is "
        "replaced; on the CPU each rank counts as one.",
    )
    window: Duration = Field("1m", description="Length of the time whose arrivals a decision is made from.")
    stabilization: Stabilization = Field(
        default_factory=Stabilization, description="How long a need must last before it is followed."
    )


#: GPUs of one replica of a role, in CEL of the whole spec.
_ROLE_RANKS = "self.{0}.parallelism.tensor * self.{0}.parallelism.pipeline"
#: What the whole spec must keep to.
POOL_RULES = (
    rule(
        "!has(self.scaling) || self.handoff.conditional != 'never'",
        "scaling sizes prefill for the handoff, and handoff.conditional is never; remove it, or remove scaling",
        field_path=".handoff.conditional",
    ),
    rule(
        "!has(self.scaling) || has(self.prefill)",
        "scaling sizes prefill and decode together; without a prefill role, change decode.replicas (kubectl "
        "scale) instead",
        field_path=".scaling",
    ),
    rule(
        "!has(self.scaling) || has(self.objectives.ttft) && has(self.objectives.itl)",
        "scaling needs the latency to keep: set objectives.ttft and objectives.itl",
        field_path=".objectives",
    ),
    rule(
        f"!has(self.scaling) || !has(self.scaling.gpuBudget) || !has(self.prefill) || "
        f"self.scaling.prefill.min * {_ROLE_RANKS.format('prefill')} + "
        f"self.scaling.decode.min * {_ROLE_RANKS.format('decode')} <= self.scaling.gpuBudget",
        "scaling.gpuBudget is less than prefill.min and decode.min groups take; raise it or lower min",
        field_path=".scaling.gpuBudget",
    ),
    rule(
        "!has(self.scaling) || !has(oldSelf.scaling) || self.decode.replicas == oldSelf.decode.replicas",
        "scaling decides the number of decode groups, and decode.replicas is only the first number: change "
        "scaling.decode.min and max, or remove scaling before kubectl scale or another autoscaler is used",
        field_path=".decode.replicas",
    ),
)


class ScalingTarget(Part):
    """Both numbers, always written together."""

    prefill: int = Field(ge=0, description="Prefill groups to have.")
    decode: int = Field(ge=0, description="Decode groups to have.")


class ScalingDecision(Part):
    """One change of the numbers."""

    time: str = Field(description="When.", json_schema_extra={"format": "date-time"})
    before: ScalingTarget = Field(description="The numbers until then.")
    after: ScalingTarget = Field(description="The numbers from then on.")
    reason: str = Field(max_length=MAX_WORDS, description="Why, in words.")


class ScalingFigures(Part):
    """What the last decision was made from. Seconds and tokens are means per request."""

    requests_per_second: float = Field(description="Requests that arrived per second, growth included.")
    prefill_seconds: float = Field(description="Prefill of the prompt tokens that no worker had cached.")
    prompt_tokens: float = Field(description="Prompt tokens.")
    output_tokens: float = Field(description="Tokens written.")
    hit_rate: float = Field(description="Share of prompt tokens that engines had cached.")
    backlog_seconds: float = Field(description="Prefill that waited, over all workers.")
    decoding: float = Field(description="Requests at the decode workers at once.")
    waiting: int = Field(description="Requests that the routers held back.")
    prefill_factor: float = Field(description="Observed prefill times over those of the model.")
    step_factor: float = Field(description="Observed times between tokens over those of the model.")
    start_seconds: float = Field(description="Time that groups took to get ready lately; 0: none did.")
    need_prefill: int | None = Field(None, description="Prefill groups that this needs; absent: no number is enough.")
    need_decode: int | None = Field(None, description="Decode groups that this needs; absent: no number is enough.")


class ScalingStatus(Part):
    """The numbers of groups to have, written by the operator alone (field manager twinpool/scaling)."""

    target: ScalingTarget = Field(description="The numbers of groups to have.")
    reason: str = Field("", max_length=MAX_WORDS, description="Why these numbers, in words.")
    time: str = Field(description="When this was written.", json_schema_extra={"format": "date-time"})
    figures: ScalingFigures | None = Field(None, description="What the numbers were made from.")
    decisions: Annotated[tuple[ScalingDecision, ...], Field(max_length=MAX_DECISIONS)] = Field(
        (), description="The last changes, the newest one first."
    )
