"""Groups that are kept for the case that others are lost: as many as the losses of the last day make worth it. Pure.

A group that is lost is missed until another one has started. That costs requests; a spare group costs GPU hours all the
time. What requests may miss their objectives anyway pays for rare losses: without any lately there is no spare, and
however large a pool is, the usual rate of failures does not make one (8 GPUs at two failures in 100,000 GPU hours, as
in Llama 3's training, arXiv 2407.21783, that take ten minutes: 0.003 % of the requests).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.operator.logic.scaling import Pair

#: Seconds for which a loss is remembered, the least time that losses are spread over, and how many are kept. With an
#: hour in place of six, design workloads of the scaling benchmark that lose groups once took a quarter more GPU hours
#: with as many requests in objectives.
MEMORY, LEAST, _MOST = 86_400.0, 21_600.0, 100


@dataclass(frozen=True, slots=True)
class Loss:
    """At ``at`` (seconds) ``lost`` of the ``served`` groups of a role (0: prefill, 1: decode) served no more."""

    at: float
    role: int
    lost: int
    served: int


def noticed(losses: Sequence[Loss], before: Pair, serving: Pair, target: Pair, now: float) -> tuple[Loss, ...]:
    """Return the losses of the last day, with those since the last look, when ``before`` groups served.

    Groups that are not wanted any more are not lost.
    """
    kept = tuple(loss for loss in losses if now - loss.at <= MEMORY)
    wanted = [min(had, want) for had, want in zip(before, target, strict=True)]
    new = (Loss(now, role, wanted[role] - serving[role], wanted[role]) for role in (0, 1))
    return (*kept, *(loss for loss in new if loss.lost > 0))[-_MOST:]


def spares(losses: Sequence[Loss], since: float, now: float, start: float, miss: float) -> Pair:
    """Return the fewest groups of each role that leave no more than ``miss`` of the requests to losses as there were.

    ``start`` are the seconds that a group takes to start, ``since`` is when looking out for losses began.
    """
    span = max(LEAST, min(MEMORY, now - since))

    def missed(role: int, spare: int) -> float:
        shares = (max(0, loss.lost - spare) / loss.served for loss in losses if loss.role == role)
        return sum(shares) * start / span

    most = max((loss.lost for loss in losses), default=0)
    found = [next(spare for spare in range(most + 1) if missed(role, spare) <= miss) for role in (0, 1)]
    return found[0], found[1]
