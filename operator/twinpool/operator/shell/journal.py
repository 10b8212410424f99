"""The last plans of every pool, for people who ask why the operator did what it did: ``/debug/pools/NS/NAME``."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinpool.operator.logic.drift import digest
from twinpool.operator.logic.observed import timestamp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.operator.logic.actions import Action
    from twinpool.operator.logic.observed import Observed
    from twinpool.operator.shell.watch import PoolKey

#: Plans that are kept per pool; equal ones on end count as one.
KEPT = 50


@dataclass(frozen=True, slots=True)
class Entry:
    """One plan, or several equal ones on end."""

    first: float
    last: float
    count: int
    observed: str
    actions: tuple[str, ...]
    result: str
    status: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the entry as it is shown."""
        conditions = self.status.get("conditions", ())
        return {
            "from": timestamp(self.first),
            "to": timestamp(self.last),
            "plans": self.count,
            "observed": self.observed,
            "actions": list(self.actions),
            "result": self.result,
            "conditions": {item["type"]: f"{item['status']} {item['reason']}" for item in conditions},
            "status": {key: value for key, value in self.status.items() if key != "conditions"},
        }


class Journal:
    """Keeps the last plans of every pool that exists."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._entries: dict[PoolKey, deque[Entry]] = {}

    def note(
        self,
        key: PoolKey,
        now: float,
        observed: Observed,
        actions: tuple[Action, ...],
        status: Mapping[str, Any],
        result: str,
    ) -> None:
        """Remember a plan."""
        entries = self._entries.setdefault(key, deque(maxlen=self._kept))
        made = Entry(now, now, 1, fingerprint(observed), tuple(in_words(action) for action in actions), result, status)
        last = entries[-1] if entries else None
        if last and dataclasses.replace(made, first=last.first, last=last.last, count=last.count) == last:
            entries[-1] = dataclasses.replace(last, last=now, count=last.count + 1)
        else:
            entries.append(made)

    def forget(self, key: PoolKey) -> None:
        """Drop a pool that is gone."""
        self._entries.pop(key, None)

    def pools(self) -> list[str]:
        """Return the pools that were planned."""
        return sorted("/".join(key) for key in self._entries)

    def show(self, key: PoolKey) -> list[dict[str, Any]] | None:
        """Return a pool's plans, the newest first, or None when it was never planned."""
        entries = self._entries.get(key)
        return None if entries is None else [entry.to_json() for entry in reversed(entries)]


def fingerprint(observed: Observed) -> str:
    """Return a digest of what was observed: equal ones must have given equal plans."""
    children = sorted((child.kind, child.name, child.uid, child.resource_version) for child in observed.children)
    pods = sorted(repr(pod) for pod in observed.pods)
    said = repr((observed.reports, observed.scaling.gist() if observed.scaling else None))
    return digest([observed.pool.metadata.uid, observed.pool.metadata.generation, children, pods, said])


def in_words(action: Action) -> str:
    """Return an action as a line: ``apply Service llama-router``."""
    return f"{type(action).__name__.lower()} {action.kind} {action.name}"
