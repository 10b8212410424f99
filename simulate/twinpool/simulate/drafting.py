"""Speculative decoding in simulated decode groups: what a token takes on average, by the batch."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from twinpool.core.drafts import DRAFTERS, MAX_BATCH, Drafter, expected_tokens, schedule, step_seconds

if TYPE_CHECKING:
    from twinpool.core.economics import Prices
    from twinpool.core.protocol import SpeculationMethod


@dataclass(frozen=True, slots=True)
class Drafting:
    """A way to draft. ``schedule``: (last batch, tokens drafted up to it), as launchers give it to engines."""

    drafter: Drafter
    schedule: tuple[tuple[int, int], ...]

    def drafted(self, batch: int) -> int:
        """Return the tokens drafted for each of ``batch`` sequences."""
        place = bisect_left(self.schedule, (batch, 0))
        return self.schedule[min(place, len(self.schedule) - 1)][1]

    def token(self, prices: Prices, batch: int, context: float) -> float:
        """Return the seconds of a step over the tokens that it gives each sequence; ``context`` is that of all."""
        if not batch:
            return 0.0
        count = self.drafted(batch)
        seconds = step_seconds(prices, self.drafter, batch, count, context / batch)
        return seconds / expected_tokens(self.drafter.acceptance, count)


def drafting_of(method: SpeculationMethod, tokens: int | Literal["auto"], prices: Prices) -> Drafting:
    """Return how a pool's decode engines draft: ``tokens`` always, or as many as pay at each batch."""
    drafter = DRAFTERS[method]
    if tokens != "auto":
        return Drafting(drafter, ((MAX_BATCH, tokens),))
    return Drafting(drafter, tuple((last, count) for _, last, count in schedule(prices, drafter)))
