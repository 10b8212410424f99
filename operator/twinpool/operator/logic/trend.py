"""How the rate of requests has moved over as long as a group takes to start, and what waits when one is up. Pure.

What jumps is over before a group that is begun at the jump serves: it is met by groups that are there, and what jumped
within the last hour is expected to do so again.

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
#: Seconds for which a jump is remembered, how many at most, and the standard deviations that make one: it is looked for
#: every few seconds, so chance has many tries.
MEMORY, _MOST_JUMPS, _CERTAIN = 3600.0, 60, 4.0
#: How far above the highest rate that a jump reached another one is expected to go (chosen on the design workloads of
#: the scaling benchmark, among 1 to 1.25).
_BEYOND = 1.1


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


def slope(rates: Sequence[Rate], newest: Rate, start: float, jumps: Sequence[Jump] = ()) -> float:
    """Return by how many requests/s the rate grew per second since about ``start`` ago; 0 where that may be chance.

    What jumped meanwhile is no slope: since a jump only what came after it is compared. The two spans do not overlap.
    Poisson: the variance of a count is its mean.
    """
    since = max((jump.at for jump in jumps), default=-math.inf)
    lag = max(newest.seconds, min(FARTHEST, start, newest.at - newest.seconds - since))
    earlier = [rate for rate in rates if newest.at - rate.at >= 0.8 * lag and rate.at >= since]
    if not earlier or newest.seconds <= 0:
        return 0.0
    old = earlier[-1]
    spread = math.sqrt(max(old.rate, 1 / old.seconds) / old.seconds + newest.rate / newest.seconds)
    more = newest.rate - old.rate
    return more / (newest.at - old.at) if more > SURE * spread else 0.0


def step_at(counts: Sequence[tuple[float, float]]) -> int | None:
    """Return the place of the first count after a sudden rise; None where a steady rise tells them better, or nothing.

    ``counts`` are seconds and the requests that came in them. Both are judged by their greatest likelihood over where
    the rise begins (Poisson): a rate that is another from there on, or one that grows evenly from there to the end. A
    step that is taken for the beginning of a rise would be extended to rates that never come.
    """
    most, found = -math.inf, None
    for place in range(1, len(counts)):
        before, after = _rate(counts[:place]), _rate(counts[place:])
        if after <= before:
            continue
        rise, passed = [], 0.0
        length = sum(seconds for seconds, _ in counts[place:])
        for seconds, _ in counts[place:]:
            rise.append(before + 2 * (after - before) * (passed + seconds / 2) / length)
            passed += seconds
        settled = [before] * place
        step = _likelihood(counts, [*settled, *([after] * len(rise))])
        if step > most:
            most, found = step, place
        steady = _likelihood(counts, [*settled, *rise])
        if steady > most:
            most, found = steady, None
    return found


def _rate(counts: Sequence[tuple[float, float]]) -> float:
    return sum(came for _, came in counts) / max(1e-3, sum(seconds for seconds, _ in counts))


def _likelihood(counts: Sequence[tuple[float, float]], rates: Sequence[float]) -> float:
    """Return the logarithm of the likelihood of Poisson counts, but for what is the same for all rates."""
    found = 0.0
    for (seconds, came), rate in zip(counts, rates, strict=True):
        mean = max(1e-6, rate * seconds)
        found += came * math.log(mean) - mean
    return found


@dataclass(frozen=True, slots=True)
class Jump:
    """The rate was ``factor`` times as high as right before, at ``at``, and so reached ``rate`` requests per second."""

    at: float
    factor: float
    rate: float


def leapt(jumps: Sequence[Jump], rates: Sequence[Rate], newest: Rate) -> tuple[Jump, ...]:
    """Return the jumps of the last hour, with that to the newest rate if it is one and no chance.

    Compared are two spans that touch. Poisson: the variance of a count is its mean.
    """
    kept = tuple(jump for jump in jumps if newest.at - jump.at <= MEMORY)[-_MOST_JUMPS:]
    earlier = [rate for rate in rates if newest.at - rate.at >= newest.seconds]
    if not earlier or earlier[-1].rate <= 0:
        return kept
    old = earlier[-1]
    spread = math.sqrt(old.rate / old.seconds + newest.rate / newest.seconds)
    if newest.rate - old.rate <= _CERTAIN * spread:
        return kept
    return (*kept, Jump(newest.at, newest.rate / old.rate, newest.rate))


def surge(jumps: Sequence[Jump], newest: Rate, since: float, start: float, miss: float) -> float:
    """Return by how much the rate is to be expected to grow before a group that is begun at a jump would serve.

    What jumped before jumps again, to little above where it came then: by the least factor that leaves no more than
    ``miss`` of the time since ``since`` to moments in whose next ``start`` seconds it jumped further.
    """
    reach = min(FARTHEST, start)
    allowed = miss * min(MEMORY, max(reach, newest.at - since))
    moments: set[int] = set()
    for jump in sorted(jumps, key=lambda jump: -jump.factor):
        moments.update(range(math.ceil((jump.at - reach) / EVERY), math.ceil(jump.at / EVERY)))
        if len(moments) * EVERY > allowed:
            most = _BEYOND * max(one.rate for one in jumps)
            return max(1.0, min(jump.factor, most / newest.rate)) if newest.rate > 0 else 1.0
    return 1.0


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
