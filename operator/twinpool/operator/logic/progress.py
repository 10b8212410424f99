"""Whether a rollout stands still: the clock is on the objects themselves, so a restart or a lost status resets nothing.

What counts as progress is what brings the newest revision closer: that it was asked for, that one of its groups was
made, that one of its pods became ready.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from twinpool.core.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Observed


def deadline(observed: Observed, existing: Sequence[Group], revision: str, wanted: Mapping[str, int]) -> float | None:
    """Return when the rollout to ``revision`` stands still for too long; None when it is done or nothing was seen."""
    newest = [group for group in existing if group.revision == revision]
    ready = Counter(group.role for group in newest if group.ready)
    if len(newest) == len(existing) and all(ready[role] == count for role, count in wanted.items()):
        return None
    times = [pod.ready_since for group in newest for pod in group.pods]
    times += [group.child.created for group in newest]
    times += [child.created for child in observed.children if child.kind == "ControllerRevision"]
    known = [time for time in times if time is not None]
    return max(known) + parse_duration(observed.pool.spec.rollout.progress_deadline) if known else None


def standstill(observed: Observed, ends: float | None, now: float) -> str:
    """Return what to say of a rollout that is not done when its deadline is over, empty before."""
    if ends is None or now < ends:
        return ""
    rollout = observed.pool.spec.rollout
    hint = ""
    if rollout.max_unavailable in (0, "0%"):
        hint = "; where no GPUs are spare, set rollout.maxSurge to 0 and rollout.maxUnavailable to 1"
    return f"nothing went on for {rollout.progress_deadline} (rollout.progressDeadline){hint}"
