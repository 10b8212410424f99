"""The ``scheduling`` block of a role: where its pods may run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from twinpool.core.fields import Part


class Toleration(Part):
    """A taint that pods of the role may ignore, as in a pod."""

    key: str | None = Field(None, max_length=317, description="Key of the taint.")
    operator: Literal["Exists", "Equal"] | None = Field(None, description="Exists or Equal.")
    value: str | None = Field(None, max_length=63, description="Value of the taint.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="Effect of the taint."
    )
    toleration_seconds: int | None = Field(None, description="How long to stay after a NoExecute taint, in seconds.")


class Scheduling(Part):
    """Where pods of the role may run."""

    node_selector: dict[str, str] = Field(
        default_factory=dict, max_length=64, description="Node labels that a node must have."
    )
    tolerations: tuple[Toleration, ...] = Field((), max_length=64, description="Taints that are tolerated.")
    priority_class_name: str | None = Field(
        None, min_length=1, max_length=253, description="Priority class of the pods."
    )
    scheduler_name: str | None = Field(None, min_length=1, max_length=253, description="Scheduler of the pods.")
    runtime_class_name: str | None = Field(None, min_length=1, max_length=253, description="Runtime class of the pods.")
