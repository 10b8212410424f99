"""What planning asks the shell to do. Each action is safe to repeat and safe to lose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
class Retire:
    """Mark a group as on its way out and scale it to 0, provided that it is still the object that was observed."""

    name: str
    uid: str
    resource_version: str

    @property
    def kind(self) -> str:
        """Return the kind of a group's object."""
        return "StatefulSet"


@dataclass(frozen=True, slots=True)
class Annotate:
    """Set an annotation of an object, provided that it is still the object that was observed."""

    kind: str
    name: str
    uid: str
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete an object, provided that it is still the object that was observed."""

    kind: str
    name: str
    uid: str
    resource_version: str


Action = Apply | Retire | Annotate | Delete


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, what to say, and when to look again at the latest (in seconds; None: when something changes)."""

    actions: tuple[Action, ...]
    status: Mapping[str, Any]
    requeue_after: float | None = None
