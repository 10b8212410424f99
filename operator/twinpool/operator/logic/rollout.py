"""The next step of a rollout: which groups to make and which to let go, from nothing but what is there now.

Prefill and decode move together, because a pair hands its KV cache over only within one revision: two prefill groups of
the new revision and two decode groups of the old one serve nobody. A step sees groups as :class:`Unit` and knows no
history, so it goes on from wherever a crash, an edit in the middle or a lost node left things. What it keeps to, the
first winning over the next where they collide:

1. *GPU budget*: never more groups of a role than wanted + surge, and of both roles together no more GPUs than the pool
   may have, those that are leaving included;
2. *progress*: while something can be done without waiting for anybody, it is done;
3. *no revision with one stage*: the last group of a role takes the rest of its revision with it;
4. *floor*: groups that serve never fall below wanted - unavailable;
5. *ratio*: each revision, and all that serves (as far as it is wanted), stays within one group of the wanted ratio.

What is worse than a bound at the start is never made worse still. ``Step.gave_up`` says when the floor had to
yield to progress: a single replica that may not be doubled cannot move without a gap. The ratio alone never stops one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from twinpool.core import protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_PREFILL, _DECODE = protocol.ROLES


class Health(Enum):
    """What a group is worth to those who ask."""

    READY = "ready"
    #: Not ready, but it may become so by itself.
    WAITING = "waiting"
    #: Its pods fail, or hold nothing yet: waiting for it is in vain.
    FAILED = "failed"
    #: A node took part of it away; it cannot come back as it is.
    LOST = "lost"
    #: On its way out.
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Unit:
    """One serving group."""

    name: str
    role: str
    revision: str
    health: Health
    #: Whether it takes part of the budget; one of which only a dead node holds the rest does not.
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many groups of a role there should be, how many more may exist, and how many fewer may serve."""

    wanted: int
    surge: int
    unavailable: int

    @property
    def floor(self) -> int:
        """Return the groups that must serve."""
        return max(0, self.wanted - self.unavailable)


@dataclass(frozen=True, slots=True)
class State:
    """What is there and what should be.

    Units are in the order in which they should go. ``known`` holds the revisions that groups can be made of besides the
    target; only a paused rollout makes any of them. ``budget`` is the most GPUs that all groups together may hold, of
    which one group of a role takes ``gpus``.
    """

    units: tuple[Unit, ...]
    bounds: Mapping[str, Bounds]
    target: str
    paused: bool = False
    known: frozenset[str] = frozenset()
    gpus: Mapping[str, int] = field(default_factory=dict)
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now. ``create`` counts the groups of ``revision`` to make for each role."""

    revision: str
    create: Mapping[str, int] = field(default_factory=dict)
    #: Names of groups to let go, the least missed first.
    retire: tuple[str, ...] = ()
    #: ``floor`` where it had to yield to progress, empty otherwise.
    gave_up: str = ""

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self.retire) or any(self.create.values())


def step(state: State) -> Step:
    """Return what to do now; nothing when all is done, or when the next step waits for pods to start or to end."""
    work = _Work(state)
    if state.paused:
        return work.paused()
    work.lose()
    work.old_that_is_of_no_use()
    work.too_many()
    work.old_that_serves()
    create = work.create()
    gave_up = ""
    if not work.retired and not any(create.values()) and work.waits_for_nobody():
        gave_up = work.force()
    return Step(state.target, create, tuple(work.retired), gave_up)


class _Work:
    """The units while a step is being made up: those that were let go are taken out at once."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.bounds = state.bounds
        self.retired: list[str] = []
        self.live = [unit for unit in state.units if unit.health is not Health.LEAVING]
        #: Live units, and those of them that are ready, by role and revision.
        self._live = Counter((unit.role, unit.revision) for unit in self.live)
        self._ready = Counter((unit.role, unit.revision) for unit in self.live if unit.health is Health.READY)
        self._held = Counter(unit.role for unit in state.units if unit.holds)
        self._leaving = any(unit.health is Health.LEAVING and unit.holds for unit in state.units)

    # What is there.

    def new(self, role: str) -> int:
        return self._live[role, self.state.target]

    def all(self, role: str) -> int:
        return sum(count for (mine, _), count in self._live.items() if mine == role)

    def old(self, role: str) -> int:
        return self.all(role) - self.new(role)

    def room(self, role: str) -> int:
        """Return how many groups may be made now; what was just let go holds its GPUs until its pods have ended."""
        limits = self.bounds[role]
        room = limits.wanted + limits.surge - self._held[role]
        if self.state.budget is not None:
            room = min(room, self._spare(self.state.budget) // self.state.gpus[role])
        return max(0, room)

    def _spare(self, budget: int) -> int:
        return budget - sum(count * self.state.gpus[role] for role, count in self._held.items())

    def serves(self, revision: str) -> bool:
        """Return whether a revision answers requests.

        Decode groups without any prefill group serve whole requests, so an older revision may consist of them alone.
        """
        if revision == self.state.target:
            return all(self._ready[role, revision] for role, limits in self.bounds.items() if limits.wanted)
        prefill = self._ready[_PREFILL, revision] or not self._live[_PREFILL, revision]
        return bool(self._ready[_DECODE, revision] and prefill)

    def serving(self) -> Counter[str]:
        """Return the units that serve, by role."""
        result: Counter[str] = Counter()
        for (role, revision), count in self._ready.items():
            result[role] += count if self.serves(revision) else 0
        return result

    def complete(self) -> bool:
        """Return whether the target serves with as many groups as are wanted."""
        return all(self._ready[role, self.state.target] >= limits.wanted for role, limits in self.bounds.items())

    def waits_for_nobody(self) -> bool:
        """Return whether old groups remain although nothing is starting or ending."""
        starting = any(unit.revision == self.state.target and unit.health is not Health.READY for unit in self.live)
        return any(self.old(role) for role in self.bounds) and not starting and not self._leaving

    # What goes.

    def let_go(self, units: Iterable[Unit]) -> None:
        """Put the units on the list; LOST ones of which nothing is held are gone from the budget already."""
        for unit in list(units):
            self.live.remove(unit)
            self._live[unit.role, unit.revision] -= 1
            self._ready[unit.role, unit.revision] -= unit.health is Health.READY
            self.retired.append(unit.name)

    def lose(self) -> None:
        """Let go of what a lost node took apart, whatever its revision."""
        self.let_go(unit for unit in self.live if unit.health is Health.LOST)

    def old_that_is_of_no_use(self) -> None:
        """Let go of old groups that serve nobody: the hopeless at once, the others as far as the floor allows."""
        for unit in self._old():
            hopeless = unit.health is Health.FAILED or not self._has_partner(unit)
            if hopeless and not self._last_hope(unit):
                self.let_go([unit])
        for role, limits in self.bounds.items():
            starting = self.new(role) - self._ready[role, self.state.target]
            spare = self.all(role) - limits.floor - starting
            idle = [unit for unit in self._old() if unit.role == role and not self._at_work(unit)]
            self.let_go([unit for unit in idle if not self._last_hope(unit)][: max(0, spare)])

    def _old(self) -> list[Unit]:
        return [unit for unit in self.live if unit.revision != self.state.target]

    def _at_work(self, unit: Unit) -> bool:
        return unit.health is Health.READY and self.serves(unit.revision)

    def _has_partner(self, unit: Unit) -> bool:
        return unit.role == _DECODE or self._live[_DECODE, unit.revision] > 0

    def _last_hope(self, unit: Unit) -> bool:
        """Return whether an old revision could serve again if this unit came back, while the new one does not yet.

        It is kept only as long as it keeps nobody out.
        """
        alone = self._live[unit.role, unit.revision] == 1
        could = alone and any(self._ready[role, unit.revision] for role in self.bounds if role != unit.role)
        in_the_way = not self.new(unit.role) and not self.room(unit.role)
        return could and not in_the_way and not self.serves(self.state.target)

    def too_many(self) -> None:
        """Let go of groups of the newest revision that nobody wants any more."""
        for role, limits in self.bounds.items():
            excess = self.new(role) - limits.wanted
            if excess > 0:
                mine = [unit for unit in self.live if (unit.role, unit.revision) == (role, self.state.target)]
                self.let_go(mine[:excess])

    def old_that_serves(self, *, strict: bool = True, most: int | None = None) -> None:
        """Let go of old groups as far as the bounds allow, of the smallest old revision first."""
        if self.complete():
            self.let_go(self._old())
            return
        begin = self.serving()
        moves = 0
        while most is None or moves < most:
            move = next((m for m in self._moves() if self._allowed(m, begin, strict=strict)), None)
            if move is None:
                return
            self.let_go(move)
            moves += 1

    def _moves(self) -> Iterator[list[Unit]]:
        """Yield what could go next: one unit, or with the last one of its role the rest of its revision."""
        sizes = Counter(unit.revision for unit in self._old())
        for revision in sorted(sizes, key=lambda name: (sizes[name], name)):
            members = [unit for unit in self.live if unit.revision == revision]
            lean = self._lean(Counter(unit.role for unit in members))
            for role in (_PREFILL, _DECODE) if lean >= 0 else (_DECODE, _PREFILL):
                mine = [unit for unit in members if unit.role == role and self._at_work(unit)]
                if mine:
                    last = self._live[role, revision] == 1
                    yield members if last else mine[:1]

    def _allowed(self, move: list[Unit], begin: Counter[str], *, strict: bool) -> bool:
        before = self.serving()
        gone = Counter(unit.role for unit in move if self._at_work(unit))
        after = before - gone
        if not any(self._reason(role, before[role]) for role in gone):
            return False
        keeps = all(after[role] >= min(begin[role], self.bounds[role].floor) for role in gone)
        return not strict or (keeps and self._in_ratio(move, before, after))

    def _reason(self, role: str, serving: int) -> bool:
        """Return whether a group of the role is one too many, or in the way of a new one."""
        limits = self.bounds[role]
        in_the_way = self.new(role) < limits.wanted and self.old(role) > limits.surge
        return serving > limits.wanted or in_the_way

    # The ratio.

    def _lean(self, counts: Mapping[str, int]) -> int:
        """Return how far counts lean towards prefill (negative: decode); a group more of a role is the other's number.

        0 where there is no ratio to keep.
        """
        wanted = {role: self.bounds[role].wanted if role in self.bounds else 0 for role in protocol.ROLES}
        if not all(wanted.values()):
            return 0
        return counts.get(_PREFILL, 0) * wanted[_DECODE] - counts.get(_DECODE, 0) * wanted[_PREFILL]

    def _within_one(self, before: Mapping[str, int], after: Mapping[str, int]) -> bool:
        one_group = max(limits.wanted for limits in self.bounds.values())
        return abs(self._lean(after)) <= max(one_group, abs(self._lean(before)))

    def _in_ratio(self, move: list[Unit], before: Counter[str], after: Counter[str]) -> bool:
        revision = move[0].revision
        mine = Counter(unit.role for unit in self.live if unit.revision == revision)
        rest = mine - Counter(unit.role for unit in move)
        return self._within_one(self._needed(before), self._needed(after)) and (
            not rest or self._within_one(mine, rest)
        )

    def _needed(self, counts: Mapping[str, int]) -> Counter[str]:
        """Return the counts up to what is wanted: more of one stage than that serves nobody better or worse."""
        return Counter({role: min(counts[role], limits.wanted) for role, limits in self.bounds.items()})

    # What is made.

    def create(self) -> dict[str, int]:
        """Return how many groups of the target to make: all that fit, but beside old ones in ratio."""
        room = {
            role: max(0, min(limits.wanted - self.new(role), self.room(role))) for role, limits in self.bounds.items()
        }
        if not any(self.old(role) for role in self.bounds):
            return self._afforded(room)
        made: Counter[str] = Counter()
        while True:
            have = Counter({role: self.new(role) + made[role] for role in self.bounds})
            order = (_PREFILL, _DECODE) if self._lean(have) < 0 else (_DECODE, _PREFILL)
            able = [role for role in order if made[role] < room.get(role, 0)]
            role = next((role for role in able if self._within_one(have, have + Counter([role]))), None)
            if role is None:
                return self._afforded({role: made[role] for role in self.bounds})
            made[role] += 1

    def _afforded(self, counts: dict[str, int]) -> dict[str, int]:
        """Cut the numbers to what the budget leaves, one group after the other of the role that lacks most."""
        if self.state.budget is None:
            return counts
        left, made = self._spare(self.state.budget), dict.fromkeys(counts, 0)
        while able := [r for r, count in counts.items() if made[r] < count and self.state.gpus[r] <= left]:
            role = min(able, key=lambda r: (self.all(r) + made[r]) / self.bounds[r].wanted)
            made[role] += 1
            left -= self.state.gpus[role]
        return made

    # When nothing else is left.

    def force(self) -> str:
        """Make the smallest step that goes on although the floor is in its way; return what yielded."""
        self.old_that_serves(strict=False, most=1)
        return "floor" if self.retired else ""

    def paused(self) -> Step:
        """Keep the numbers without moving from one revision to another."""
        self.lose()
        sizes = Counter(unit.revision for unit in self.live)
        able = [name for name in sizes if name in self.state.known or name == self.state.target]
        base = max(able, key=lambda name: (sizes[name], name == self.state.target, name), default=self.state.target)
        create = {}
        for role, limits in self.bounds.items():
            most = limits.wanted + (limits.surge if len(sizes) > 1 else 0)
            mine = [unit for unit in self.live if unit.role == role]
            self.let_go(mine[: max(0, len(mine) - most)])
            create[role] = max(0, min(limits.wanted - len(mine), self.room(role)))
        return Step(base, self._afforded(create), tuple(self.retired))
