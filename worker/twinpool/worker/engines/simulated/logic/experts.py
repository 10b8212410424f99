"""The experts of a simulated mixture: how unevenly tokens go to them, where they are, and what that costs. Pure.

Loads are expectations, not draws: expert ``i`` is asked for in proportion to a power of its place. Experts begin in
their order, copies of the first ones behind them; with balancing they move once, after so many steps, as DeepSeek's
EPLB does (github.com/deepseek-ai/EPLB): copies go to whoever has most, then the heaviest to the emptiest GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from twinpool.core.errors import InvalidValue

#: Share of a step that experts take; the rest does not wait for the busiest GPU. Assumed.
SHARE = 0.5
#: Experts that a token is sent to in each layer, and layers that have them.
PER_TOKEN, LAYERS = 8, 58
_KEYS = {"num_redundant_experts", "step_interval", "window_size", "log_balancedness", "log_balancedness_interval"}


@dataclass(frozen=True, slots=True)
class Balancing:
    """vLLM's ``--eplb-config``: copies in each layer, steps until experts move, steps between two lines of the log."""

    redundant: int = 0
    interval: int = 3000
    told_every: int = 0


@dataclass(frozen=True, slots=True)
class Mixture:
    """``count`` experts on ``ranks`` GPUs, of which that at place ``i`` gets ``(i + 1) ** -skew`` parts of the load."""

    ranks: int
    count: int = 256
    skew: float = 0.0
    balancing: Balancing | None = None

    def ratio(self, step: int) -> float:
        """Return the load of the busiest GPU over the mean in the ``step``-th step."""
        moved = self.balancing is not None and step >= self.balancing.interval
        copies = self.balancing.redundant if self.balancing else 0
        return _ratio(self.count, self.skew, self.ranks, copies, moved=moved)

    def factor(self, step: int) -> float:
        """Return how many times as long a step takes as with even loads."""
        return 1 + SHARE * (self.ratio(step) - 1)

    def silent(self) -> Mixture:
        """Return the same on a rank that logs nothing."""
        return replace(self, balancing=self.balancing and replace(self.balancing, told_every=0))

    def line(self, step: int, tokens: int) -> str:
        """Return what vLLM logs of a step of ``tokens``; empty for a step of which it logs nothing."""
        told = self.balancing.told_every if self.balancing else 0
        if self.balancing is None or not told or step % told or not tokens:
            return ""
        mean = tokens * PER_TOKEN * LAYERS / self.ranks
        most = round(mean * self.ratio(step))
        left = self.balancing.interval - step % self.balancing.interval
        return (
            f"EPLB step: {step % self.balancing.interval} for model simulated: avg_tokens={mean:.2f}, "
            f"max_tokens={most}, balancedness={mean / most:.4f}, steps until the next rearrangement: {left}"
        )


@lru_cache(maxsize=64)
def _ratio(count: int, skew: float, ranks: int, copies: int, *, moved: bool) -> float:
    loads: list[float] = [(place + 1) ** -skew for place in range(count)]
    placed = balanced(loads, ranks, copies) if moved else linear(loads, ranks, copies)
    return float(max(placed) * ranks / sum(loads))


def linear(loads: list[float], ranks: int, copies: int) -> list[float]:
    """Return the load of each GPU while experts are in their order, with copies of the first ones behind them."""
    count = len(loads)
    slots = [*range(count), *(place % count for place in range(copies))]
    each = {expert: slots.count(expert) for expert in set(slots)} if copies else {}
    held = len(slots) // ranks
    return [
        sum(loads[expert] / each.get(expert, 1) for expert in slots[rank * held : (rank + 1) * held])
        for rank in range(ranks)
    ]


def balanced(loads: list[float], ranks: int, copies: int) -> list[float]:
    """Return the load of each GPU after EPLB's greedy replication and packing, equally many experts on each."""
    counts = [1] * len(loads)
    for _ in range(copies):
        busiest = max(range(len(loads)), key=lambda expert: loads[expert] / counts[expert])
        counts[busiest] += 1
    parts = [load / count for load, count in zip(loads, counts, strict=True) for _ in range(count)]
    room = [len(parts) // ranks] * ranks
    placed = [0.0] * ranks
    for part in sorted(parts, reverse=True):
        rank = min((rank for rank in range(ranks) if room[rank]), key=placed.__getitem__)
        placed[rank] += part
        room[rank] -= 1
    return placed


def mixture(ranks: int, count: int, skew: float, *, enabled: bool, config: str | None) -> Mixture:
    """Return the mixture that flags describe.

    Raises
    ------
    InvalidValue
        When ``--eplb-config`` cannot be used, or experts cannot be spread evenly.
    """
    if config is not None and not enabled:
        raise InvalidValue("--eplb-config needs --enable-eplb", "give both, as for vLLM")
    try:
        given: Any = json.loads(config or "{}")
    except ValueError as error:
        raise InvalidValue(f"--eplb-config is not JSON: {error}", "write it as for vLLM") from None
    if not isinstance(given, dict) or not given.keys() <= _KEYS:
        raise InvalidValue("--eplb-config has keys that are not known", f"known are: {', '.join(sorted(_KEYS))}")
    told = given.get("log_balancedness_interval", 1) if given.get("log_balancedness") else 0
    copies = given.get("num_redundant_experts", 0)
    if (count + copies) % ranks:
        raise InvalidValue(
            f"{count} experts and {copies} copies cannot be spread evenly over {ranks} ranks",
            "choose copies so that the sum is a multiple",
        )
    balancing = Balancing(copies, given.get("step_interval", 3000), told) if enabled else None
    return Mixture(ranks, count, skew, balancing)
