"""What a pool would do with a trace: rates, routing rules and numbers of groups beside each other. Pure; seconds.

Rules, prices and planner are those that decide in production. Nothing here is a measurement: times are the model's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from twinpool.operator.logic.scaling import plan_scale
from twinpool.operator.logic.scaling_need import Demand
from twinpool.simulate.pool import play
from twinpool.simulate.scores import pooled_hit, quantile, score

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twinpool.core.economics import Prices
    from twinpool.operator.logic.scaling import Decision, Limits, Pair
    from twinpool.operator.logic.scaling_need import Group, Promise
    from twinpool.simulate.engines import Job
    from twinpool.simulate.pool import Setup
    from twinpool.simulate.scaler import Change
    from twinpool.simulate.scores import Score
    from twinpool.simulate.traces import Request


@dataclass(frozen=True, slots=True)
class Variant:
    """One run: ``rate`` multiplies the trace's rate, ``rule`` chooses prefill workers.

    ``scaled``: the numbers of groups are those of the beginning, and then follow the work.
    """

    rate: float
    rule: str
    prefill: int
    decode: int
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """Requests that wait for their first token, and that are written, at one moment (seconds since the first one)."""

    at: float
    waiting: int
    writing: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a variant. ``gpu_hours`` are those of all groups from the first arrival to the last end.

    ``capacity``: the greatest rate, in requests/s, at which it keeps its objectives; None when nobody asked.
    ``groups``: how many of each role served, from which moment on; ``changes``: what the autoscaler decided.
    """

    variant: Variant
    score: Score
    gpu_hours: float
    moments: tuple[Moment, ...] = ()
    capacity: float | None = None
    groups: tuple[tuple[float, Pair], ...] = ()
    changes: tuple[Change, ...] = ()


def at_rate(trace: Sequence[Request], rate: float) -> list[Request]:
    """Return the trace with ``rate`` times as many requests per second."""
    return [replace(request, arrival=request.arrival / rate) for request in trace]


def as_in(setup: Setup, variant: Variant) -> Setup:
    """Return the pool with the rule and the groups of ``variant``."""
    scaling = setup.scaling if variant.scaled else None
    return replace(setup, rule=variant.rule, prefill=variant.prefill, decode=variant.decode, scaling=scaling)


def run(
    trace: Sequence[Request],
    setup: Setup,
    variant: Variant,
    promise: Promise,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """Return what comes of one variant."""
    played = play(at_rate(trace, variant.rate), as_in(setup, variant), progress)
    jobs = played.jobs
    return Outcome(
        variant, score(jobs, promise.ttft, promise.itl), played.gpu_hours, course(jobs),
        groups=played.course, changes=played.changes,
    )  # fmt: skip


def course(jobs: Sequence[Job], count: int = 120) -> tuple[Moment, ...]:
    """Return ``count`` moments, evenly from the first arrival to the last end; what was never answered always waits."""
    came, began, ended = (
        sorted(times)
        for times in (
            [job.request.arrival for job in jobs], [job.first for job in jobs], [job.finish for job in jobs],
        )
    )  # fmt: skip
    last = max([time for time in ended if time != math.inf], default=0.0)
    found = []
    for place in range(count + 1):
        at = last * place / count
        arrived, first, gone = (bisect_right(times, at) for times in (came, began, ended))
        found.append(Moment(at, arrived - first, first - gone))
    return tuple(found)


def demand(trace: Sequence[Request], prices: Prices, cache: int) -> Demand:
    """Return the work of a trace as the planner sees it, with the hits of one cache of ``cache`` tokens."""
    hit = pooled_hit(trace, cache)
    works = sorted(prices.prefill(request.prompt * (1 - hit), request.prompt * hit) for request in trace)
    mean = fmean(works)
    gaps = [after.arrival - before.arrival for before, after in pairwise(trace)]
    return Demand(
        rate=len(trace) / max(1e-9, trace[-1].arrival),
        prefill=mean,
        prompt=fmean(request.prompt for request in trace),
        output=fmean(request.output for request in trace),
        long_prefill=quantile(works, 0.9),
        prefill_variation=_variation(works),
        arrival_variation=max(1.0, _variation(gaps)) if gaps else 1.0,
    )


def _variation(values: Sequence[float]) -> float:
    """Return the squared coefficient of variation."""
    mean = fmean(values)
    return fmean((value - mean) ** 2 for value in values) / mean**2 if mean else 0.0


def planned(work: Demand, prices: Prices, promise: Promise, group: Group, limits: Limits) -> Decision:
    """Return the numbers of groups that the production planner gives the trace's mean work."""
    return plan_scale(work, prices, promise, group, limits, (limits.prefill[0], limits.decode[0]))
