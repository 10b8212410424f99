"""All times of a drain, derived from a role's ``drainTimeout`` alone so that none can contradict another.

For a worker that may drain D seconds::

    0 ............ D ....... D+10 .. D+14 . D+15            its pod's grace period
    requests run   engine    engine  the    the kubelet
                   asked     killed  pod    kills
                   to stop           is gone

Routers of the pool outlive its workers: they may drain as long as the slowest worker's whole grace period, and their
own grace period is longer by the same margin.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from twinpool.core.units import parse_duration
from twinpool.operator.logic import names

if TYPE_CHECKING:
    from twinpool.core.spec import InferencePool, WorkerRole
    from twinpool.operator.logic.observed import Child

#: Seconds that a pod gets beyond its drain: the launcher's (or router's) own end, and the kubelet's.
GRACE_MARGIN = 15
#: The kubelet's default grace period, for templates that do not say one.
_DEFAULT_GRACE = 30


def worker_grace(role: WorkerRole) -> int:
    """Return the grace period of a role's pods."""
    return math.ceil(parse_duration(role.drain_timeout)) + GRACE_MARGIN


def router_drain(pool: InferencePool) -> int:
    """Return how long a router may serve on: until the last worker that ends with it is gone."""
    return max(worker_grace(role) for role in names.roles(pool).values())


def router_grace(pool: InferencePool) -> int:
    """Return the grace period of the router's pods."""
    return router_drain(pool) + GRACE_MARGIN


def drain_seconds(group: Child) -> float:
    """Return how long a group's requests may run, by its own template: that is what its launchers follow."""
    spec = group.content.get("spec", {}).get("template", {}).get("spec", {})
    grace: int = spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE)
    return float(max(0, grace - GRACE_MARGIN))
