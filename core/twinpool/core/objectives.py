"""The latency that a pool promises its users."""

from __future__ import annotations

from pydantic import Field

from twinpool.core.fields import Duration, Part


class Objectives(Part):
    """Latency that users are promised."""

    ttft: Duration | None = Field(None, description="Time to first token.")
    itl: Duration | None = Field(None, description="Time between two tokens.")
    percentile: int = Field(99, ge=50, le=99, description="Share of requests, in percent, that must meet them.")
