"""Kubernetes Events of a pool: what changed between two statuses, for ``kubectl describe`` and ``kubectl events``.

A condition says how things are, an Event that they became so. Events are made from the transition that is written, so
a pool that does not change makes none, and an operator that restarts repeats none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from twinpool.operator.logic.drift import digest
from twinpool.operator.logic.observed import timestamp

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

#: Longest message of an Event that the API server takes.
MAX_MESSAGE = 1024

#: Conditions whose transitions are told. Progressing is told when it ends, well or not.
_TOLD = ("Ready", "Progressing", "Placed", "Routable")
_ON_THE_WAY = ("Waiting", "Changing", "Scheduling")
#: Reasons that a pool which is only starting has too.
_EXPECTED = ("RouterNotReady", "NoPrefillReady", "NoDecodeReady", "ScaledToZero", "Complete", "RolloutPaused")


@dataclass(frozen=True, slots=True)
class Note:
    """One Event, without names and times."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    action: str


def transitions(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Note]:
    """Return what became different from one status to the next."""
    earlier = {item["type"]: item for item in before.get("conditions") or ()}
    found = [_note(earlier.get(item["type"]), item) for item in after.get("conditions") or ()]
    notes = [note for note in found if note is not None]
    old, new = before.get("revision"), after.get("revision")
    if old and new and old != new:
        notes.insert(0, Note("Normal", "NewRevision", f"the pool goes from revision {old} to {new}", "Rollout"))
    return _without_echoes(notes)


def _note(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> Note | None:
    kind, status, reason = now["type"], now["status"], now["reason"]
    unknown = status == "Unknown" and reason not in _EXPECTED
    if kind not in _TOLD or unknown or reason in _ON_THE_WAY:
        return None
    if before is not None and (before["status"], before["reason"]) == (status, reason):
        return None
    was = before["status"] if before is not None else "Unknown"
    good = status == "True" or (reason in _EXPECTED and (kind == "Progressing" or was != "True"))
    return Note("Normal" if good else "Warning", reason, now["message"][:MAX_MESSAGE], kind)


def _without_echoes(notes: Iterable[Note]) -> list[Note]:
    """Drop what says the same as an earlier one: a crash shows in several conditions."""
    seen: set[tuple[str, str]] = set()
    result = []
    for note in notes:
        if (note.reason, note.message) not in seen:
            seen.add((note.reason, note.message))
            result.append(note)
    return result


def event(note: Note, pool: Mapping[str, str], reporter: str, count: int, first: float, now: float) -> dict[str, Any]:
    """Return the Event as the API server takes it; equal notes about a pool have one name, so they are counted.

    ``pool`` is the reference to the pool: apiVersion, kind, name, namespace, uid.
    """
    name = f"{pool['name']}.{digest([pool['uid'], note.type, note.reason, note.message, note.action])}"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": pool["namespace"]},
        "involvedObject": dict(pool),
        "type": note.type,
        "reason": note.reason,
        "message": note.message,
        "action": note.action,
        "count": count,
        "firstTimestamp": timestamp(first),
        "lastTimestamp": timestamp(now),
        "source": {"component": "twinpool-operator"},
        "reportingComponent": "serving.twinpool.dev/operator",
        "reportingInstance": reporter,
    }
