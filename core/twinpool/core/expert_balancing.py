"""The ``expertBalancing`` block of a role: experts of a mixture that move, or are kept twice, by how busy they are."""

from __future__ import annotations

from pydantic import Field

from twinpool.core.fields import Part


class ExpertBalancing(Part):
    """How the engine evens out the load of experts (vLLM's EPLB)."""

    redundant_experts: int = Field(
        0,
        ge=0,
        le=4096,
        description="Copies of experts in each layer, given to the busiest; experts and copies must divide by the GPUs "
        "that share them. They take memory of the KV cache: twinpool plan says how much.",
    )
    interval: int = Field(3000, ge=1, le=1_000_000, description="Steps of the engine after which experts may move.")
    window: int = Field(1000, ge=1, le=100_000, description="Steps whose load decides where they move.")
