"""How the rate of requests has moved over as long as a group takes to start, and what waits when one is up. Pure.

A rise that a window of a minute cannot tell from chance is certain over three: what counts is how much more there will
be when a group that is begun now serves. And a backlog is worth a group only as far as it is still there by then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Standard deviations by which a rate must exceed the earlier one to count as growth.
SURE = 2.0
#: Seconds between two rates that are remembered, and the longest start that is looked ahead for.
EVERY, FARTHEST = 10.0, 900.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests per second over the ``seconds`` before ``at``."""

    at: float
    rate: float
    seconds: float


def remembered(rates: Sequence[Rate], newest: Rate, start: float) -> tuple[Rate, ...]:
    """Return the rates with the newest one, as far back as a look ahead by ``start`` seconds wants them."""
    if rates and newest.at - rates[-1].at < EVERY:
        return tuple(rates)
    reach = newest.at - min(FARTHEST, start) - 2 * newest.seconds
    return (*(rate for rate in rates if rate.at >= reach), newest)


def slope(rates: Sequence[Rate], newest: Rate, start: float) -> float:
    """Return by how many requests/s the rate grew per second since about ``start`` ago; 0 where that may be chance.

    The two spans do not overlap. Poisson: the variance of a count is its mean.
    """
    lag = max(newest.seconds, min(FARTHEST, start))
    earlier = [rate for rate in rates if newest.at - rate.at >= 0.8 * lag]
    if not earlier or newest.seconds <= 0:
        return 0.0
    old = earlier[-1]
    spread = math.sqrt(max(old.rate, 1 / old.seconds) / old.seconds + newest.rate / newest.seconds)
    more = newest.rate - old.rate
    return more / (newest.at - old.at) if more > SURE * spread else 0.0


def standing(backlog: float, load: float, serving: int, coming: int, start: float) -> float:
    """Return the seconds of a prefill backlog that still wait when a group that is begun now is up.

    ``load`` is the prefill that arrives per second, ``serving`` the groups that work it off all the time, ``coming``
    those that are starting: half of the time, on average. Without it a backlog that grows while groups start would ask
    for more of them again and again, for work that is done before they serve.
    """
    if start <= 0:
        return backlog
    horizon = min(FARTHEST, start)
    return max(0.0, backlog + (load - serving - coming / 2) * horizon)


def in_flight(flying: float, room: int, slot: float, drain: float) -> float:
    """Return the sequences that decode groups must hold at once so that those without a place are gone in ``drain`` s.

    ``room`` are the places there are, ``slot`` the seconds for which a sequence takes one. Beyond the room sequences
    wait: each takes a place for a moment only, and does not need one of its own for good.
    """
    return min(flying, room) + max(0.0, flying - room) * min(1.0, slot / drain)
