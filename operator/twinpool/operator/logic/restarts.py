"""Restarts in place of a group's engine: counted on its StatefulSet, so that they outlast pods and operators.

Launchers restart an engine that ends without ending its pod, so Kubernetes counts nothing. The leader's launcher knows
how often it did that and what is left of its budget; it is asked while a group that has served does not serve. Always
true: the note on the set changes only when the launcher counts something else than the note has from it, so what was
missed meanwhile is caught up with, and nothing is counted twice, whoever asks and however often.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Annotate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Observed, PodView

#: Longest reason that a note holds; the launcher's own ``/status`` has all of it.
MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class Life:
    """What a leader's launcher says of its engine. Times in seconds."""

    #: Number of the current start, and restarts in this launcher's life.
    epoch: int = 0
    restarts: int = 0
    #: Restarts within the window, how many it allows, and its length.
    recent: int = 0
    budget: int = 0
    window: float = 0.0
    #: How long it waits, or waited, before the newest start.
    backoff: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """What stands on a StatefulSet. ``total`` counts restarts over all launchers that the group has had."""

    leader: str
    total: int
    life: Life

    def to_json(self) -> str:
        """Return the value of the annotation."""
        return json.dumps({"leader": self.leader, "total": self.total, **dataclasses.asdict(self.life)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Note | None:
        """Read what :meth:`to_json` wrote; None for anything else."""
        try:
            value = json.loads(text)
            return cls(str(value["leader"]), int(value["total"]), _life(value))
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def read_life(document: Any) -> Life | None:
    """Return the answer of a launcher's ``/status``, or None when it is no such answer."""
    if not isinstance(document, Mapping) or not isinstance(document.get("restarts"), int):
        return None
    return _life(document)


def _life(values: Mapping[str, Any]) -> Life:
    """Return what is known; a launcher of an earlier version says less."""
    return Life(
        epoch=_count(values.get("epoch")),
        restarts=_count(values.get("restarts")),
        recent=_count(values.get("recent")),
        budget=_count(values.get("budget")),
        window=_seconds(values.get("window")),
        backoff=_seconds(values.get("backoff")),
        reason=str(values.get("reason") or "")[:MAX_REASON],
    )


def _count(value: Any) -> int:
    return max(0, value) if isinstance(value, int) else 0


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def to_ask(groups: Iterable[Group]) -> list[PodView]:
    """Return the leaders whose launchers are asked: they have served, and their engines are not ready now."""
    return [pod for group in groups if not group.retired and (pod := group.leader) is not None and _restarts(pod)]


def _restarts(pod: PodView) -> bool:
    here = pod.phase == "Running" and bool(pod.address) and pod.deadline is None
    return here and pod.has_served and not pod.containers_ready


def counting(observed: Observed, groups: Iterable[Group]) -> list[Annotate]:
    """Return the notes to write."""
    return [action for group in groups if not group.retired for action in _of_group(observed, group)]


def _of_group(observed: Observed, group: Group) -> list[Annotate]:
    leader = group.leader
    life = observed.lives.get(leader.uid) if leader is not None else None
    if leader is None or life is None:
        return []
    note = _note(group)
    counted = note.life.restarts if note is not None and note.leader == leader.uid else 0
    if life.restarts == counted:
        return []
    # One that counts less is another launcher: its container was restarted, too.
    gained = life.restarts - counted if life.restarts > counted else life.restarts
    total = (note.total if note is not None else 0) + gained
    value = Note(leader.uid, total, life).to_json()
    return [Annotate("StatefulSet", group.name, group.child.uid, names.RESTARTS_ANNOTATION, value)]


def _note(group: Group) -> Note | None:
    return Note.from_json(group.child.annotation(names.RESTARTS_ANNOTATION) or "")


def restarting(groups: Iterable[Group]) -> str:
    """Return what to say of the first group whose engine is being restarted in place, empty when none is."""
    for group in groups:
        note, leader = _note(group), group.leader
        if note is None or leader is None or note.leader != leader.uid or not _restarts(leader):
            continue
        life = note.life
        left = f", {life.recent} of {life.budget} times within {life.window / 60:g} minutes" if life.budget else ""
        why = f": {life.reason}" if life.reason else ""
        return f"the engine of group {group.name} is restarted in place{left}{why}"
    return ""
