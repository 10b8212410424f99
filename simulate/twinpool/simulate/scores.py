"""What a run was worth to its users: how many got what was promised, and how certain the figure is."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.simulate.cache import Cache
from twinpool.simulate.traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twinpool.simulate.engines import Job
    from twinpool.simulate.traces import Request

#: Two-sided 95 % points of Student's t by degrees of freedom; beyond the table the normal one.
_STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True, slots=True)
class Score:
    """One run. ``attainment``: share of requests that met both objectives; ``hit``: share of prompt tokens cached."""

    attainment: float
    ttft_mean: float
    ttft_p99: float
    itl_p99: float
    hit: float


def score(jobs: Sequence[Job], ttft: float, itl: float) -> Score:
    """Judge a run by objectives in seconds; a request that was never answered meets neither."""
    firsts = sorted(job.first - job.request.arrival for job in jobs)
    gaps = sorted(_itl(job) for job in jobs)
    met = sum(job.first - job.request.arrival <= ttft and _itl(job) <= itl for job in jobs)
    prompt = sum(job.request.prompt for job in jobs)
    return Score(
        attainment=met / len(jobs),
        ttft_mean=statistics.fmean(firsts),
        ttft_p99=quantile(firsts, 0.99),
        itl_p99=quantile(gaps, 0.99),
        hit=sum(job.hit for job in jobs) / prompt,
    )


def _itl(job: Job) -> float:
    """Return the mean time between tokens, as engines and clients define it: (last - first) / (tokens - 1)."""
    if job.finish == math.inf:
        return math.inf
    return (job.finish - job.first) / (job.request.output - 1) if job.request.output > 1 else 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of the ``ordered`` values that at least ``share`` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Return mean and half width of the 95 % confidence interval of the mean; 0 for a single value."""
    found = list(values)
    mean = statistics.fmean(found)
    if len(found) < 2:
        return mean, 0.0
    return mean, _STUDENT.get(len(found) - 1, 1.96) * statistics.stdev(found) / math.sqrt(len(found))


def pooled_hit(trace: Sequence[Request], capacity: int) -> float:
    """Return the share of prompt tokens that one cache of ``capacity`` tokens for the whole pool would have held."""
    cache = Cache(capacity // BLOCK_TOKENS)
    hit = 0
    for request in trace:
        hit += cache.leading(request.blocks) * BLOCK_TOKENS
        cache.use(request.blocks)
    return hit / sum(request.prompt for request in trace)
