"""What two looks at a pool counted of its requests, stages and workers. Plain data, from which findings are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.core.protocol import Role
    from twinpool.core.tier_use import TierUse

#: What a request's time to the first token is made of, in order.
Stage = Literal["router queue", "prefill queue", "prefill", "pull", "decode start"]
STAGES: tuple[Stage, ...] = ("router queue", "prefill queue", "prefill", "pull", "decode start")


@dataclass(frozen=True, slots=True)
class Worker:
    """One group's leader: requests in flight, seconds per token (None without tokens), KV blocks in use (0 to 1)."""

    name: str
    role: Role
    in_flight: float = 0.0
    waiting: float = 0.0
    seconds_per_token: float | None = None
    kv_used: float = 0.0
    preemptions: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What was counted within ``window`` seconds. Times in seconds, sizes in bytes.

    ``stages`` are seconds summed over all requests. ``hit_share`` is the share of prompt tokens at prefill that were
    cached, in the window and in the engines' whole life. ``gpus`` are those of one group. ``tiers`` are what the KV
    tiers of the workers that read prompts gave back, ``compute_seconds`` what computing a prompt token takes there.
    """

    window: float
    requests: float
    stages: Mapping[Stage, float] = field(default_factory=dict)
    ttft_p99: float | None = None
    itl_p99: float | None = None
    ttft_objective: float | None = None
    itl_objective: float | None = None
    workers: tuple[Worker, ...] = ()
    wanted: Mapping[Role, int] = field(default_factory=dict)
    routable: Mapping[Role, int] = field(default_factory=dict)
    gpus: Mapping[Role, int] = field(default_factory=dict)
    hit_share: float = 0.0
    hit_share_ever: float = 0.0
    pulled_bytes: float = 0.0
    pull_seconds: float = 0.0
    expert_balance: float | None = None
    tiers: tuple[TierUse, ...] = ()
    compute_seconds: float | None = None
    simulated: bool = False
