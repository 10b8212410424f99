"""Why a controller cannot make the pods that were asked for: quota, Pod Security, or another admission rule.

A StatefulSet says so in Events alone, a Deployment in its conditions. What is read here are the controllers' words.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.core.errors import InvalidValue
from twinpool.core.managed import refuse_managed
from twinpool.operator.logic import names
from twinpool.operator.logic.failures import MAX_MESSAGE, Failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Observed

#: Sets whose Events are read at once: the first ones tell, the others lack the same.
MOST = 2

_REASONS = (
    ("exceeded quota", "QuotaExceeded", "raise the ResourceQuota of the namespace, or ask for less"),
    ("failed quota", "QuotaExceeded", "set resources.cpu and resources.memory, which the namespace's quota asks for"),
    ("violates PodSecurity", "PodSecurityRefused", "adapt podTemplate, or the namespace's pod-security label"),
    ("forbidden", "PodsForbidden", ""),
)


def lacking(groups: Iterable[Group]) -> list[Group]:
    """Return the groups, at most :data:`MOST`, whose controller has made fewer pods than it was asked for."""
    return [group for group in groups if not group.retired and group.child.seen and group.child.pods < group.size][
        :MOST
    ]


def complaint(events: Sequence[Mapping[str, Any]]) -> str:
    """Return the newest message of a set's ``FailedCreate`` Events, empty when there is none."""
    failed = [item for item in events if item.get("reason") == "FailedCreate"]
    newest = max(failed, key=_time, default={})
    return str(newest.get("message") or "")


def _time(event: Mapping[str, Any]) -> str:
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")


def argument(pool: InferencePool) -> Failure | None:
    """Return which engine argument the launchers will refuse; None when there is none.

    The CRD refuses flags that are spelled in full, at once; abbreviations cost more than its rules may.
    """
    for role in names.roles(pool).values():
        try:
            refuse_managed(pool.spec.engine.args + role.engine.args)
        except InvalidValue as error:
            return Failure("ArgumentRefused", str(error))
    return None


def refused(observed: Observed) -> Failure | None:
    """Return why pods of the pool cannot be made, or None when nothing is known of it."""
    said = [(child.kind, child.name, child.complaint) for child in observed.children if child.complaint]
    if not said:
        return None
    kind, name, text = min(said, key=lambda entry: entry[1])
    reason, step = next(((why, todo) for word, why, todo in _REASONS if word in text), ("PodsRefused", ""))
    return Failure(reason, f"{kind} {name} gets no pods: {text}{' - ' if step else ''}{step}"[:MAX_MESSAGE])
