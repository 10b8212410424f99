"""What the simulator foretells for a run of one engine, and by how much it errs. Pure; seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.simulate.cache import Cache
from twinpool.simulate.clock import Clock
from twinpool.simulate.engines import DecodeWorker, Job, PrefillWorker
from twinpool.simulate.scores import quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.core.economics import Prices
    from twinpool.simulate.traces import Request

#: KV tokens, more than the requests of a run hold at a time.
_ROOM = 10**9


@dataclass(frozen=True, slots=True)
class Times:
    """Times to first token, and mean times between tokens of requests with several, of one run; both sorted."""

    ttft: Sequence[float]
    itl: Sequence[float]


def times(requests: Sequence[Request], found: Sequence[tuple[float, float]]) -> Times:
    """Return the times of ``requests`` by when each one's first and last token came, counted from its arrival."""
    spans = [
        (last - first) / (request.output - 1)
        for request, (first, last) in zip(requests, found, strict=True)
        if request.output > 1
    ]
    return Times(sorted(first for first, _ in found), sorted(spans))


def foretold(requests: Sequence[Request], prices: Prices) -> Times:
    """Return the times that the simulator gives: of a prefill worker where all answers have one token, otherwise of a
    worker that reads and writes."""
    clock = Clock()
    jobs = [Job(request) for request in requests]
    if all(request.output == 1 for request in requests):
        reader = PrefillWorker(clock, prices, Cache(0))
        for job in jobs:
            job.prefilled = lambda job=job: _ended(job, clock.now)  # type: ignore[misc]
            clock.at(job.request.arrival, lambda job=job: reader.submit(job))  # type: ignore[misc]
    else:
        worker = DecodeWorker(clock, prices, _ROOM, Cache(0))
        for job in jobs:
            clock.at(job.request.arrival, lambda job=job: worker.submit(job, None))  # type: ignore[misc]
    clock.run()
    return times(requests, [(job.first - job.request.arrival, job.finish - job.request.arrival) for job in jobs])


def _ended(job: Job, now: float) -> None:
    job.first = job.finish = now


def error(foretold: Sequence[float], observed: Sequence[float], share: float) -> float:
    """Return by which share of what was observed the quantile was foretold too high (or, negative, too low)."""
    return quantile(foretold, share) / quantile(observed, share) - 1
