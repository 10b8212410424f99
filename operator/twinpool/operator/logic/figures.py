"""The figures of a pool for Prometheus, from its status. Pure.

Always true: what a pool's condition says now is one series, so its reasons never add up while it lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.units import parse_duration
from twinpool.operator.logic import names
from twinpool.operator.logic.pods import gpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.autoscaler import Scaled

#: States of a role's groups, as in the pool's status.
STATES = ("desired", "created", "ready", "routable", "updated")


@dataclass(frozen=True, slots=True)
class Figure:
    """One sample: the metric's name after ``twinpool_operator_pool_``, the labels after the pool's, and the value."""

    metric: str
    labels: tuple[str, ...]
    value: float


def figures(pool: InferencePool, status: Mapping[str, Any], scaled: Scaled | None = None) -> Iterator[Figure]:
    """Yield the samples of a pool with this status, and what its arriving work needs where that is known."""
    for name, role in names.roles(pool).items():
        counts = status.get(name, {})
        for state in STATES:
            yield Figure("groups", (name, state), counts.get(state, 0))
        yield Figure("gpus", (name,), counts.get("created", 0) * gpus(pool, role))
    for kind, text in (("ttft", pool.spec.objectives.ttft), ("itl", pool.spec.objectives.itl)):
        if text:
            yield Figure("objective_seconds", (kind,), parse_duration(text))
    if scaled is not None and scaled.outcome.figures is not None:
        for name, need in zip(protocol.ROLES, scaled.outcome.figures.need, strict=True):
            yield Figure("needed_groups", (name,), need)
    for item in status.get("conditions", ()):
        yield Figure("condition", (item["type"], item["status"], item["reason"]), 1)
