"""Requests that wait for room at the workers: who goes next, and who is told to come back.

Always true: the queue has a fixed size; a request is in it once or not at all; it leaves by going ahead, by its
deadline, by giving way, or with its client. Smaller priorities go first, as in vLLM. Within one priority each API key
gets an equal share of the admitted tokens, whatever it sends (start-time fair queueing: Goyal, Vin and Cheng 1996).
Of one key the first comes first, but the last once the first has waited for half of the objective: in overload those
who come then meet it, where all would miss it that wait their turn (adaptive LIFO: Maurer, "Fail at Scale", 2015).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")

#: Priorities are cut to this range; engines take any whole number.
MOST_URGENT: Final = -8
LEAST_URGENT: Final = 7
#: Bounds in seconds of what a client that must come back is told.
_SOONEST: Final = 1
_LATEST: Final = 60


@dataclass(eq=False, slots=True)
class Waiting(Generic[Item]):
    """One request in the queue. ``tokens`` is its cost; times are in seconds on the caller's clock."""

    item: Item
    key: str
    priority: int
    tokens: int
    since: float


@dataclass(slots=True)
class _Class(Generic[Item]):
    """The requests of one priority, in order of arrival for each key, and what each key has had."""

    lines: dict[str, deque[Waiting[Item]]] = field(default_factory=dict)
    #: Virtual time: the start tag of the request that went last, and the tag with which each key's next one starts.
    now: float = 0.0
    tags: dict[str, float] = field(default_factory=dict)


class Queue(Generic[Item]):
    """At most ``size`` requests; ``patience`` seconds is how long one may wait before a newcomer may take its place.

    ``objective`` says that the patience is the objective for the first token, by which the order changes in overload.
    """

    def __init__(self, size: int, patience: float, *, objective: bool = False) -> None:
        self._size = size
        self._patience = patience
        self._turns = patience / 2 if objective else math.inf
        self._classes: dict[int, _Class[Item]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, waiting: Waiting[Item], now: float) -> Waiting[Item] | None:
        """Let a request wait; return who gives way: None, another request, or this very one when there is no room.

        Who waits longer than the patience will miss its objective anyway, and goes before others have to.
        """
        out = None
        if self._count >= self._size:
            out = self._hopeless(waiting.priority, now)
            if out is None:
                return waiting
            self.remove(out)
        group = self._classes.setdefault(waiting.priority, _Class())
        group.lines.setdefault(waiting.key, deque()).append(waiting)
        self._count += 1
        return out

    def _hopeless(self, priority: int, now: float) -> Waiting[Item] | None:
        """Return who gives way to a newcomer of ``priority``.

        The one that waits longest beyond the patience, else the latest of a less urgent priority.
        """
        levels = [level for level in sorted(self._classes, reverse=True) if level >= priority]
        for level in levels:
            oldest = min((line[0] for line in self._classes[level].lines.values()), key=_since)
            if now - oldest.since > self._patience:
                return oldest
        if levels and levels[0] > priority:
            return max((line[-1] for line in self._classes[levels[0]].lines.values()), key=_since)
        return None

    def pop(self, now: float) -> Waiting[Item] | None:
        """Take the request that goes next."""
        if not self._count:
            return None
        group = self._classes[min(self._classes)]
        tags = {key: max(group.tags.get(key, 0.0), group.now) for key in group.lines}
        key = min(group.lines, key=lambda k: (tags[k], group.lines[k][0].since))
        line = group.lines[key]
        waiting = line[-1] if now - line[0].since > self._turns else line[0]
        group.now = tags[key]
        group.tags[key] = tags[key] + max(1, waiting.tokens)
        self.remove(waiting)
        return waiting

    def expired(self, before: float) -> list[Waiting[Item]]:
        """Take the requests that wait since ``before`` or longer."""
        late = [
            waiting
            for group in self._classes.values()
            for line in group.lines.values()
            for waiting in line
            if waiting.since <= before
        ]
        for waiting in late:
            self.remove(waiting)
        return late

    def remove(self, waiting: Waiting[Item]) -> None:
        """Take a request out, for example because its client left; the second time is nothing."""
        group = self._classes.get(waiting.priority)
        line = None if group is None else group.lines.get(waiting.key)
        if group is None or line is None or waiting not in line:
            return
        if line[-1] is waiting:
            line.pop()
        else:
            line.remove(waiting)  # in nearly all other cases the first
        self._count -= 1
        if not line:
            del group.lines[waiting.key]
        if not group.lines:
            # Nobody waits: nobody has had more than others either.
            del self._classes[waiting.priority]


def _since(waiting: Waiting[Item]) -> float:
    return waiting.since


def retry_after(waiting: int, per_second: float) -> int:
    """Return after how many seconds a client should come back: when those that wait now will have gone ahead."""
    if per_second <= 0:
        return _LATEST
    return min(max(math.ceil(waiting / per_second), _SOONEST), _LATEST)
