"""What planning asks the shell to do. Each action is safe to repeat and safe to lose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from twinpool.core.protocol import KIND

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of a whole object.

    ``uid`` and ``resource_version`` are those of the object that was observed, which it must still be: what was
    planned from an old view, or by a leader that was replaced meanwhile, undoes nothing. Empty when none was observed.
    """

    body: Mapping[str, Any]
    uid: str = ""
    resource_version: str = ""
    #: Who changed the object after just this was applied to it (empty: unknown); None when this is news.
    against: str | None = None

    @property
    def kind(self) -> str:
        """Return the object's kind."""
        kind: str = self.body["kind"]
        return kind

    @property
    def name(self) -> str:
        """Return the object's name."""
        name: str = self.body["metadata"]["name"]
        return name


@dataclass(frozen=True, slots=True)
class Try:
    """Ask the API server whether it would take a new set for ``role`` of ``revision``; nothing is made."""

    body: Mapping[str, Any]
    revision: str
    role: str

    @property
    def kind(self) -> str:
        """Return the object's kind."""
        kind: str = self.body["kind"]
        return kind

    @property
    def name(self) -> str:
        """Return the object's name."""
        name: str = self.body["metadata"]["name"]
        return name


@dataclass(frozen=True, slots=True)
class Retire:
    """Mark a group as on its way out, provided that it is still the object that was observed.

    ``until`` (RFC 3339) is when it is scaled to 0 even if requests still run; ``kept`` is until when its pods stay even
    if none does, in case that the group is missed (None: not at all).
    """

    kind: ClassVar[str] = "StatefulSet"
    name: str
    uid: str
    resource_version: str
    until: str
    kept: str | None = None


@dataclass(frozen=True, slots=True)
class PutBack:
    """Take the mark off a group that was let go, provided that it is still the object that was observed."""

    kind: ClassVar[str] = "StatefulSet"
    name: str
    uid: str
    resource_version: str


#: Why a drain ended: nothing was in flight any more, time was over, or the group did not serve.
DrainResult = Literal["drained", "deadline", "not_serving"]


@dataclass(frozen=True, slots=True)
class ScaleToZero:
    """End the pods of a marked group, provided that it is still the object that was observed."""

    kind: ClassVar[str] = "StatefulSet"
    name: str
    uid: str
    resource_version: str
    result: DrainResult


@dataclass(frozen=True, slots=True)
class SetGate:
    """Open or close a pod's readiness gate."""

    kind: ClassVar[str] = "Pod"
    name: str
    uid: str
    open: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Annotate:
    """Set an annotation of an object (None takes it away), provided that it is still the object that was observed."""

    kind: str
    name: str
    uid: str
    key: str
    value: str | None


@dataclass(frozen=True, slots=True)
class HandOver:
    """Hand a gated pod to kube-scheduler, for one node or (empty) any, by a JSON patch that tests who the pod is."""

    kind: ClassVar[str] = "Pod"
    name: str
    uid: str
    node: str
    patch: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Delete a pod that must get another node: one that was handed over cannot be gated again."""

    kind: ClassVar[str] = "Pod"
    name: str
    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete an object, provided that it is still the object that was observed."""

    kind: str
    name: str
    uid: str
    resource_version: str


@dataclass(frozen=True, slots=True)
class WriteScaling:
    """Write both numbers of groups into the pool's status, in one write, provided that it is as it was observed.

    ``scaling`` is the whole ``status.scaling``; None takes it away.
    """

    kind: ClassVar[str] = KIND
    name: str
    uid: str
    resource_version: str
    scaling: Mapping[str, Any] | None
    #: Whether the numbers change.
    changes: bool = False


Action = Apply | Try | Retire | PutBack | ScaleToZero | SetGate | Annotate | HandOver | TakeBack | Delete | WriteScaling


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, what to say, and when to look again at the latest (in seconds; None: when something changes)."""

    actions: tuple[Action, ...]
    status: Mapping[str, Any]
    requeue_after: float | None = None
