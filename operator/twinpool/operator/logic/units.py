"""From a pool and its groups to what the rollout planner sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.operator.logic.failures import failure
from twinpool.operator.logic.ratio import wanted as wanted_groups
from twinpool.operator.logic.rollout import Bounds, Health, State, Unit
from twinpool.operator.logic.target import gpus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from twinpool.core.rollout import Rollout
    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.revision import Revision


def state(
    pool: InferencePool, leaving_first: Iterable[Group], target: str, known: Sequence[Revision], now: float
) -> State:
    """Return what the planner decides from; ``leaving_first`` has the groups in the order in which they should go."""
    return State(
        units=tuple(_unit(group, now) for group in leaving_first),
        bounds=bounds(pool),
        target=target,
        paused=pool.spec.rollout.paused,
        known=frozenset(revision.name for revision in known),
        gpus=gpus(pool.spec),
        budget=_budget(pool),
    )


def bounds(pool: InferencePool) -> dict[str, Bounds]:
    """Return the bounds of every role of a pool; see :func:`bounds_of`."""
    return bounds_of(pool.spec.rollout, wanted_groups(pool), gpus(pool.spec), _budget(pool))


def bounds_of(
    rollout: Rollout, wanted: Mapping[str, int], each: Mapping[str, int], budget: int | None
) -> dict[str, Bounds]:
    """Return the bounds of every role; a role that is not wanted has no groups. ``each``: GPUs of one group.

    A surge that the GPU budget leaves no room for is none, and what cannot be doubled moves with a gap.
    """
    spare = None if budget is None else budget - sum(count * each[role] for role, count in wanted.items())
    found: dict[str, Bounds] = {}
    for role in protocol.ROLES:
        count = wanted.get(role, 0)
        surge, unavailable = rollout.bounds(role, count)
        if spare is not None and count:
            surge = min(surge, max(0, spare) // each[role])
            spare -= surge * each[role]
        found[role] = Bounds(count, surge, unavailable if surge or unavailable else 1)
    return found


def _budget(pool: InferencePool) -> int | None:
    return None if pool.spec.scaling is None else pool.spec.scaling.gpu_budget


def _unit(group: Group, now: float) -> Unit:
    ended = group.retired and group.gone
    return Unit(group.name, group.role, group.revision, health(group, now), holds=not ended and not group.lost(now))


def health(group: Group, now: float) -> Health:
    """Return what a group is worth. Without a pod that has a node it holds no GPU and has loaded nothing yet."""
    if group.retired:
        return Health.LEAVING
    if group.torn(now):
        return Health.LOST
    if group.ready:
        return Health.READY
    if any(failure(pod) for pod in group.pods) or not any(pod.scheduled for pod in group.pods):
        return Health.FAILED
    return Health.WAITING
