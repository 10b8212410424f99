"""How long groups take to start, and which of them take too long to be counted on. Pure; seconds."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from twinpool.core import protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import PodView
    from twinpool.operator.logic.scaling import Pair

#: Longest start that is believed.
_LONGEST = 3600.0
#: Starts from which on their 95th percentile can be seen; with fewer, twice the longest one stands for it.
_ENOUGH = 20


def times(pods: Iterable[PodView]) -> list[float]:
    """Return how long worker pods took from their creation until they served; an engine's later restart is no start."""
    return sorted(
        min(_LONGEST, pod.ready_since - pod.created)
        for pod in pods
        if pod.gated and pod.ready_since is not None and pod.created is not None and pod.ready_since > pod.created
    )


def usual(took: Sequence[float]) -> float:
    """Return how long groups took lately, 0 when none did."""
    return median(took) if took else 0.0


def patience(took: Sequence[float]) -> float:
    """Return after how long a group that does not serve is not counted on; infinite while no group ever started."""
    if not took:
        return math.inf
    if len(took) < _ENOUGH:
        return 2 * max(took)
    return sorted(took)[math.ceil(0.95 * len(took)) - 1]


def serving(existing: Iterable[Group]) -> Pair:
    """Return the groups that serve."""
    roles = [group.role for group in existing if group.ready]
    return roles.count("prefill"), roles.count("decode")


def late(existing: Iterable[Group], limit: float, now: float) -> Pair:
    """Return the groups that have their nodes and never served, for longer than ``limit``.

    Those that wait for nodes are no reason for more groups, which would wait as well; those that served once are
    restarted or replaced by others.
    """
    roles = [group.role for group in existing if not group.ready and not group.retired and _late(group, limit, now)]
    prefill, decode = protocol.ROLES
    return roles.count(prefill), roles.count(decode)


def _late(group: Group, limit: float, now: float) -> bool:
    leader = group.leader
    if leader is None or leader.created is None or leader.has_served or leader.deadline is not None:
        return False
    return len(group.pods) >= group.size and all(pod.node for pod in group.pods) and now - leader.created > limit
