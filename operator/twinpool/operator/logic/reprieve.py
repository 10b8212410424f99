"""Groups that the autoscaler let go stay for a while without work: what turns out to be missed comes back at once.

Such a group is marked like every other that goes, so routers send it nothing new; but its pods stay until the time that
its mark holds. Wanted again meanwhile, it loses the mark instead of a new group being made, which saves a cold start.
Always true: it holds its GPUs all that time, and gives them up at once where the budget needs them for others, or where
a rollout replaces its revision.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from twinpool.core.units import parse_duration
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import PutBack
from twinpool.operator.logic.observed import seconds, timestamp
from twinpool.operator.logic.ratio import wanted as wanted_groups
from twinpool.operator.logic.target import gpus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.groups import Group


def until(pool: InferencePool, group: Group, revision: str, now: float) -> str | None:
    """Return until when the pods of a group that is let go now stay (RFC 3339); None where it goes for good."""
    scaling = pool.spec.scaling
    if scaling is None or not group.ready or group.revision != revision:
        return None
    return timestamp(now + parse_duration(scaling.window))


def stays_until(group: Group) -> float | None:
    """Return until when the pods of a marked group stay, in seconds since 1970; None where nothing keeps them."""
    return seconds(group.child.annotation(names.KEPT_ANNOTATION)) if group.retired else None


def returned(pool: InferencePool, existing: Sequence[Group], revision: str) -> tuple[Group, ...]:
    """Return the groups, those among them taken back that were let go lately and are wanted again."""
    wanted = wanted_groups(pool)
    missing = Counter(wanted)
    missing.subtract(group.role for group in existing if not group.retired)
    result = []
    for group in existing:
        back = missing[group.role] > 0 and _whole(group, revision)
        missing[group.role] -= back
        result.append(replace(group, returning=True) if back else group)
    return tuple(result)


def _whole(group: Group, revision: str) -> bool:
    """Return whether a group that was let go could serve again at once."""
    serving = [pod for pod in group.pods if pod.containers_ready and pod.deadline is None]
    return (
        stays_until(group) is not None
        and not group.child.deleting
        and group.revision == revision
        and group.replicas == group.size == len(serving)
    )


def put_back(existing: Iterable[Group]) -> list[PutBack]:
    """Return what takes the mark off groups that come back."""
    return [PutBack(group.name, group.child.uid, group.child.resource_version) for group in existing if group.returning]


def kept(pool: InferencePool, existing: Sequence[Group], revision: str, now: float) -> frozenset[str]:
    """Return the names of marked groups whose pods stay although nothing is left for them to do."""
    staying = [
        group
        for group in existing
        if (stays_until(group) or 0.0) > now and group.revision == revision and group.replicas
    ]
    if not _room(pool, existing):
        return frozenset()
    return frozenset(group.name for group in staying)


def _room(pool: InferencePool, existing: Iterable[Group]) -> bool:
    """Return whether the budget holds all groups that are wanted beside those that are going."""
    scaling = pool.spec.scaling
    if scaling is None or scaling.gpu_budget is None:
        return scaling is not None
    each, wanted = gpus(pool.spec), wanted_groups(pool)
    going = Counter(group.role for group in existing if group.retired and not group.gone)
    return sum((wanted.get(role, 0) + going[role]) * each[role] for role in each) <= scaling.gpu_budget
