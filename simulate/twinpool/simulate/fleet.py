"""Which groups a simulated pool has: ordered, starting, serving, let go, lost, replaced. Seconds of virtual time.

What is made and what goes is decided by the operator's own functions (``operator/logic/rollout.py``, ``scale_in.py``).
Always true: routers choose among those that serve and no others; a group holds its GPUs from its order until it is
gone; all groups together never hold more GPUs than the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from twinpool.core import protocol
from twinpool.core.rollout import Rollout
from twinpool.operator.logic import scale_in
from twinpool.operator.logic.rollout import Health, State, Unit, step
from twinpool.operator.logic.units import bounds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from twinpool.core.protocol import Role
    from twinpool.operator.logic.scaling import Pair
    from twinpool.simulate.clock import Clock
    from twinpool.simulate.engines import DecodeWorker, PrefillWorker

#: Seconds until one looks again whether a group that goes has ended.
_LOOK = 1.0

_Engine = TypeVar("_Engine", bound="PrefillWorker | DecodeWorker")


@dataclass(frozen=True, slots=True)
class Loss:
    """So many groups of a role end at ``at``, with all that they do; the operator makes others in their place."""

    at: float
    role: Role
    count: int = 1


@dataclass(frozen=True, slots=True)
class Life:
    """What befalls the groups of a pool.

    ``start`` is how long one takes from its order until it serves, ``window`` for how long one that is let go stays
    and could come back, ``gpus`` those of one group of each role. At each time of ``rolls`` a new revision replaces
    all of them, as ``rollout`` says.
    """

    start: float = 60.0
    losses: tuple[Loss, ...] = ()
    gpus: Pair = (1, 1)
    budget: int | None = None
    window: float = 60.0
    rolls: tuple[float, ...] = ()
    rollout: Rollout = field(default_factory=Rollout)


@dataclass(eq=False, slots=True)
class Member(Generic[_Engine]):
    """One group. ``leaving`` is until when it stays although it was let go; None while it is wanted."""

    name: str
    serial: int
    engine: _Engine
    ordered: float
    revision: str
    ready: bool = False
    leaving: float | None = None

    @property
    def id(self) -> str:
        """Return its name: a group that was lost never comes back."""
        return self.name

    @property
    def ranks(self) -> int:
        """Return its data-parallel ranks: simulated groups have one."""
        return 1


@dataclass(slots=True)
class Side(Generic[_Engine]):
    """The groups of one role: all that there are, and in the same order each time those that serve."""

    role: Role
    make: Callable[[str], _Engine]
    members: list[Member[_Engine]] = field(default_factory=list)
    serving: list[Member[_Engine]] = field(default_factory=list)
    #: From when and until when those were held that are gone.
    ended: list[tuple[float, float]] = field(default_factory=list)
    made: int = 0

    def wanted(self) -> list[Member[_Engine]]:
        """Return the groups that are not to go."""
        return [member for member in self.members if member.leaving is None]

    def order(self, now: float, revision: str) -> Member[_Engine]:
        """Begin one more."""
        name = f"{self.role[0]}{self.made}"
        member = Member(name, self.made, self.make(name), now, revision)
        self.made += 1
        self.members.append(member)
        return member

    def take_back(self, count: int, now: float, revision: str) -> None:
        """Want those again that were let go lately, as far as there are fewer than ``count``."""
        kept = [one for one in self.members if one.leaving is not None and one.leaving > now]
        kept = [one for one in kept if one.revision == revision]
        for member in kept[: max(0, count - len(self.wanted()))]:
            member.leaving = None

    def let_go(self, names: Container[str], until: float, revision: str, now: float) -> None:
        """Let some go. Those of ``revision`` stay until ``until``, those that have yet to start go at once."""
        for member in [one for one in self.wanted() if one.name in names]:
            if member.ready:
                member.leaving = until if member.revision == revision else now
            else:
                self.end(member, now)

    def units(self, work: Mapping[str, int], revision: str) -> Iterator[Unit]:
        """Yield what the rollout planner sees, in the order in which they should go."""
        facts = {
            member.name: scale_in.Facts(outdated=member.revision != revision, work=work.get(member.name, 0))
            for member in self.members
        }
        for member in scale_in.order(self.members, facts):
            health = Health.READY if member.ready else Health.WAITING
            yield Unit(member.name, self.role, member.revision, health if member.leaving is None else Health.LEAVING)

    def idle(self) -> list[Member[_Engine]]:
        """Return those that were let go and have nothing to do."""
        return [member for member in self.members if member.leaving is not None and not member.engine.busy]

    def end(self, member: Member[_Engine], now: float) -> None:
        """Give up the GPUs of a group."""
        self.members.remove(member)
        self.ended.append((member.ordered, now))

    def lose(self, count: int, now: float) -> list[Member[_Engine]]:
        """End the first ``count`` that serve; return them."""
        lost = self.serving[:count]
        for member in lost:
            self.end(member, now)
        return lost

    def settle(self) -> bool:
        """Look which groups serve; return whether they are others than before."""
        before, self.serving = self.serving, [one for one in self.members if one.ready and one.leaving is None]
        return before != self.serving

    def held(self, end: float) -> float:
        """Return for how many seconds groups have been held until ``end``, added up."""
        times = [*self.ended, *((member.ordered, end) for member in self.members)]
        return sum(max(0.0, min(gone, end) - ordered) for ordered, gone in times)


class Fleet:
    """The groups of both roles. ``told`` hears each time that other groups serve than before."""

    def __init__(
        self,
        clock: Clock,
        life: Life,
        make: tuple[Callable[[str], PrefillWorker], Callable[[str], DecodeWorker]],
        told: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._life = life
        self._told = told
        prefill, decode = protocol.ROLES
        self.prefill: Side[PrefillWorker] = Side(prefill, make[0])
        self.decode: Side[DecodeWorker] = Side(decode, make[1])
        self.target: Pair = (0, 0)
        self._revision = 0
        self._work: Mapping[str, int] = {}
        self._looks = False
        #: How many groups of each role serve, from which moment on.
        self.course: list[tuple[float, Pair]] = []

    def begin(self, pair: Pair) -> None:
        """Have the first groups, which serve from the start."""
        self.target = pair
        for side, count in zip(self._sides, pair, strict=True):
            for _ in range(count):
                side.order(0.0, self._name).ready = True
        self._changed()
        for moment in self._life.rolls:
            self._clock.at(moment, self._roll)
        for loss in self._life.losses:
            self._clock.at(loss.at, lambda loss=loss: self._lose(loss))  # type: ignore[misc]

    @property
    def _sides(self) -> tuple[Side[Any], Side[Any]]:
        return self.prefill, self.decode

    def there(self) -> Pair:
        """Return the groups that exist and stay, starting ones included."""
        return len(self.prefill.wanted()), len(self.decode.wanted())

    def serving(self) -> Pair:
        """Return the groups that serve."""
        return len(self.prefill.serving), len(self.decode.serving)

    def busy(self) -> bool:
        """Return whether any group has something to do."""
        return any(member.engine.busy for side in self._sides for member in side.members)

    def resize(self, pair: Pair, work: Mapping[str, int]) -> None:
        """Make ``pair`` the numbers to have. What the budget does not hold yet is made at a later call.

        ``work`` is what each group has to do in tokens, for the choice of who goes.
        """
        self.target, self._work = pair, work
        self._step()

    @property
    def _name(self) -> str:
        return f"r{self._revision}"

    def _roll(self) -> None:
        self._revision += 1
        self._step()

    def _step(self) -> None:
        """Do what the operator would do now; again soon, as long as groups start or end."""
        now, life = self._clock.now, self._life
        self._release()
        for side, count in zip(self._sides, self.target, strict=True):
            side.take_back(count, now, self._name)
        planned = step(self._state())
        for side in self._sides:
            side.let_go(planned.retire, now + life.window, self._name, now)
            for _ in range(planned.create.get(side.role, 0)):
                self._start(side)
        self._changed()
        if any(member.leaving is not None for side in self._sides for member in side.members):
            self._look_again()

    def _state(self) -> State:
        wanted: dict[str, int] = dict(zip(protocol.ROLES, self.target, strict=True))
        each: dict[str, int] = dict(zip(protocol.ROLES, self._life.gpus, strict=True))
        return State(
            tuple(unit for side in self._sides for unit in side.units(self._work, self._name)),
            bounds_of(self._life.rollout, wanted, each, self._life.budget),
            self._name,
            gpus=each,
            budget=self._life.budget,
        )

    def _look_again(self) -> None:
        if not self._looks:
            self._looks = True
            self._clock.at(self._clock.now + _LOOK, self._looked)

    def _looked(self) -> None:
        self._looks = False
        self._step()

    def gpu_hours(self, end: float) -> float:
        """Return the GPU hours of all groups until ``end``."""
        return sum(side.held(end) * gpus for side, gpus in zip(self._sides, self._life.gpus, strict=True)) / 3600

    def _release(self) -> None:
        """End those that were let go and have nothing to do, unless they are kept and the budget holds them."""
        now = self._clock.now
        for side in self._sides:
            for member in side.idle():
                if (member.leaving or 0.0) <= now or not self._fits():
                    side.end(member, now)

    def _fits(self) -> bool:
        """Return whether the budget holds all groups that are wanted beside those that are going."""
        if self._life.budget is None:
            return True
        going = [len(side.members) - len(side.wanted()) for side in self._sides]
        total = zip(self.target, going, self._life.gpus, strict=True)
        return sum((wanted + leaving) * gpus for wanted, leaving, gpus in total) <= self._life.budget

    def _start(self, side: Side[Any]) -> None:
        member = side.order(self._clock.now, self._name)

        def ready() -> None:
            if member in side.members:
                member.ready = True
                self._step()

        self._clock.at(self._clock.now + self._life.start, ready)

    def _lose(self, loss: Loss) -> None:
        side = self._sides[protocol.ROLES.index(loss.role)]
        lost = side.lose(loss.count, self._clock.now)
        self._changed()
        for member in lost:
            member.engine.lose()
        self._step()

    def _changed(self) -> None:
        prefill, decode = self.prefill.settle(), self.decode.settle()
        if prefill or decode:
            self.course.append((self._clock.now, self.serving()))
            self._told()
