"""Several prefill workers behind one router wait as long as M/G/c says.

A router that sends each prompt where the least work is left does what one queue for all workers does (Kiefer and
Wolfowitz, 1955); the closed form is Erlang's for M/M/c, and Allen and Cunneen's approximation for M/G/c. The books of a
router drop a prompt when it is done and not while it is computed, so with prompts of one length, where that is all that
tells workers apart, waits are longer than M/D/c by about a quarter: that case is left to one worker (M/D/1).
"""

from __future__ import annotations

import statistics
from random import Random
from typing import TYPE_CHECKING

import pytest

from twinpool.core.economics import Prices
from twinpool.core.queueing import mean_wait
from twinpool.simulate.pool import Setup, simulate
from twinpool.simulate.traces import Request

if TYPE_CHECKING:
    from collections.abc import Callable

#: A second for each prompt token, and nothing else takes time.
ONLY_PREFILL = Prices(
    overhead=0.0, weights=0.0, context=0.0, token=1.0, pair=0.0, pull_setup=0.0, pull_token=0.0
)  # fmt: skip


def exponential(dice: Random) -> int:
    return 1 + round(dice.expovariate(1 / 1000))


def mostly_short(dice: Random) -> int:
    return dice.choice([200] * 8 + [4200] * 2)


def waits(workers: int, use: float, size: Callable[[Random], int], seed: int) -> float:
    """Return the mean wait before prefill, in seconds, of 8 000 prompts of a thousand tokens each."""
    dice, now, trace = Random(seed), 0.0, []
    for _ in range(8_000):
        now += dice.expovariate(workers * use / 1000)
        trace.append(Request(now, size(dice), 1))
    jobs = simulate(trace, Setup(ONLY_PREFILL, workers, 1, 0, 10**9, rule="mooncake"))
    # The step of the only token takes a second more, a thousandth of a prompt.
    return statistics.fmean(job.first - job.request.arrival - job.request.prompt for job in jobs)


@pytest.mark.parametrize(
    ("workers", "use", "size", "variation", "within"),
    [(3, 0.7, exponential, 1.0, 0.1), (3, 0.7, mostly_short, 2.56, 0.2)],
)
def test_several_workers_wait_as_long_as_m_g_c_says(
    workers: int, use: float, size: Callable[[Random], int], variation: float, within: float
) -> None:
    found = statistics.fmean(waits(workers, use, size, seed) for seed in range(2))
    assert found == pytest.approx(mean_wait(workers, workers * use / 1000, 1000.0, services=variation), rel=within)
