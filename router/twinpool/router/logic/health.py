"""The router's own opinion of an endpoint, from probes of its engine's ``/health``.

A probe that times out says nothing: a busy engine answers late, and taking it out would move its load onto the others.
Kubernetes decides about readiness; the probe only notices sooner that nobody is listening.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

#: Failures in a row that take an endpoint out.
FAILURES: Final = 2
#: Seconds between two probes: while something is to be found out, and later.
QUICK_SECONDS: Final = 0.25
SLOW_SECONDS: Final = 2.0
#: Probes of endpoints that are well, in a second, all together: with more than a hundred of them each has its turn less
#: often. What fails between two probes is noticed by the requests that go there.
MOST_PER_SECOND: Final = 50.0


class Probe(Enum):
    """What a probe found."""

    OK = "status 200"
    FAILED = "refused, reset, or another status"
    LATE = "no answer in time"


@dataclass(frozen=True, slots=True)
class Health:
    """What is thought of an endpoint."""

    admitted: bool = False
    failures: int = 0
    #: How often it was taken out. What answers afterwards is another engine, which knows nothing of the old one's KV.
    losses: int = 0

    def interval(self, endpoints: int = 1) -> float:
        """Return the seconds until the next probe, when there are so many endpoints."""
        if self.admitted and not self.failures:
            return max(SLOW_SECONDS, endpoints / MOST_PER_SECOND)
        return QUICK_SECONDS


def judge(health: Health, probe: Probe) -> Health:
    """Return the opinion after one more probe."""
    if probe is Probe.OK:
        return Health(admitted=True, losses=health.losses)
    if probe is Probe.LATE:
        return health
    failures = health.failures + 1
    lost = health.admitted and failures >= FAILURES
    return Health(
        admitted=health.admitted and not lost, failures=min(failures, FAILURES), losses=health.losses + int(lost)
    )
