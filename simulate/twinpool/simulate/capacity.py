"""The greatest rate at which a pool keeps what it promises: its goodput (DistServe, OSDI'24, section 2). Pure.

Always true: at the rate that is returned the objectives were kept in a run, and at one a little above they were not.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from twinpool.simulate.pool import simulate
from twinpool.simulate.scores import score
from twinpool.simulate.whatif import at_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twinpool.operator.logic.scaling_need import Promise
    from twinpool.simulate.pool import Setup
    from twinpool.simulate.traces import Request

#: Multiples of the given rate that are looked at, and how close to the greatest one the search ends.
_LEAST, _MOST = 1 / 1024, 1024
_CLOSE = 1.02


def greatest(keeps: Callable[[float], bool]) -> float:
    """Return the greatest factor at which ``keeps`` holds, within 2 %; 0.0 where it never does.

    By doubling or halving from 1, then by halving the interval in proportion; ``keeps`` should not hold again above a
    factor at which it does not. Nothing above 2048 is looked for.
    """
    low = 1.0
    if keeps(low):
        while low < _MOST and keeps(2 * low):
            low *= 2
    else:
        low /= 2
        while not keeps(low):
            if low <= _LEAST:
                return 0.0
            low /= 2
    high = 2 * low
    while high / low > _CLOSE:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def greatest_rate(trace: Sequence[Request], setup: Setup, promise: Promise) -> float:
    """Return how many times the trace's rate the pool serves with both objectives kept for as many as promised.

    A trace should be long beside what waits: a queue that would grow for ever has little time to in a short one.
    """

    def keeps(rate: float) -> bool:
        jobs = simulate(at_rate(trace, rate), setup)
        return score(jobs, promise.ttft, promise.itl).attainment >= 1 - promise.miss

    return greatest(keeps)
