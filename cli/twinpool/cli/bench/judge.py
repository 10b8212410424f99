"""What a run was worth: percentiles, goodput, errors by kind. Pure; times in seconds.

Every time counts from the moment at which a request *should* have been sent. If this machine or its connections were
late, that is part of the wait, as it would be for a user: nothing is left out because the sender stood still
(coordinated omission).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.simulate.scores import quantile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_SHARES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
#: A sender that is this late at its 99th percentile measures itself.
LATE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Moments are seconds on one clock; ``events`` are those of the answer's pieces, the first included.

    ``error`` is empty for an answer that came whole; then ``tokens`` is how many the endpoint says to have written.
    """

    due: float
    sent: float
    end: float
    events: tuple[float, ...] = ()
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Return the time to the first piece."""
        return self.events[0] - self.due if self.events else math.inf

    @property
    def itl(self) -> float:
        """Return the mean time between tokens after the first, as engines define it: (last - first) / (tokens - 1)."""
        return (self.events[-1] - self.events[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Objectives:
    """What each request is promised, in seconds, and the share of requests that must get it."""

    ttft: float = math.inf
    itl: float = math.inf
    share: float = 0.99

    @property
    def given(self) -> bool:
        """Say whether anything is promised."""
        return self.ttft < math.inf or self.itl < math.inf


@dataclass(frozen=True, slots=True)
class Report:
    """A run in figures; ``times`` maps ttft, itl, gap and e2e to mean and percentiles, without those of failures."""

    requests: int
    answered: int
    seconds: float
    errors: Mapping[str, int]
    times: Mapping[str, Mapping[str, float]]
    request_rate: float
    output_rate: float
    prompt_tokens: int
    output_tokens: int
    #: Share of all requests, failed ones too, that kept the objectives, and how many of those there were a second.
    attained: float
    goodput: float
    #: How late requests were sent at the 99th percentile.
    late: float


def judge(samples: Sequence[Sample], objectives: Objectives) -> Report:
    """Return the figures of a run, from the first request's moment to the last one's end; there must be a sample."""
    whole = [sample for sample in samples if not sample.error]
    seconds = max(sample.end for sample in samples) - min(sample.due for sample in samples)
    rate = 1 / seconds if seconds else 0.0
    kept = sum(sample.ttft <= objectives.ttft and sample.itl <= objectives.itl for sample in whole)
    output = sum(sample.tokens for sample in whole)
    return Report(
        requests=len(samples),
        answered=len(whole),
        seconds=seconds,
        errors=dict(Counter(sample.error for sample in samples if sample.error).most_common()),
        times={
            "ttft": _summary(sample.ttft for sample in whole),
            "itl": _summary(sample.itl for sample in whole if sample.tokens > 1),
            "gap": _summary(b - a for s in whole for a, b in zip(s.events, s.events[1:], strict=False)),
            "e2e": _summary(sample.end - sample.due for sample in whole),
        },
        request_rate=len(whole) * rate,
        output_rate=output * rate,
        prompt_tokens=sum(sample.prompt_tokens for sample in whole),
        output_tokens=output,
        attained=kept / len(samples),
        goodput=kept * rate,
        late=quantile(sorted(sample.sent - sample.due for sample in samples), 0.99),
    )


def passed(report: Report, objectives: Objectives) -> bool:
    """Say whether every request was answered, or, with objectives, enough of them as promised."""
    return report.attained >= objectives.share if objectives.given else report.answered == report.requests


def _summary(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        "mean": math.fsum(ordered) / len(ordered),
        **{name: quantile(ordered, share) for name, share in _SHARES.items()},
        "max": ordered[-1],
    }
