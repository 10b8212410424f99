"""Which groups a simulated pool has: ordered, starting, serving, let go, lost. Seconds of virtual time.

Always true: routers choose among those that serve and no others; a group holds its GPUs from its order until it is
gone; all groups together never hold more GPUs than the budget. Which group goes is decided as in production.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from twinpool.core import protocol
from twinpool.operator.logic import scale_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twinpool.core.protocol import Role
    from twinpool.operator.logic.scaling import Pair
    from twinpool.simulate.clock import Clock
    from twinpool.simulate.engines import DecodeWorker, PrefillWorker

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
    and could come back, ``gpus`` those of one group of each role.
    """

    start: float = 60.0
    losses: tuple[Loss, ...] = ()
    gpus: Pair = (1, 1)
    budget: int | None = None
    window: float = 60.0


@dataclass(eq=False, slots=True)
class Member(Generic[_Engine]):
    """One group. ``leaving`` is until when it stays although it was let go; None while it is wanted."""

    name: str
    serial: int
    engine: _Engine
    ordered: float
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

    def order(self, now: float) -> Member[_Engine]:
        """Begin one more."""
        name = f"{self.role[0]}{self.made}"
        member = Member(name, self.made, self.make(name), now)
        self.made += 1
        self.members.append(member)
        return member

    def take_back(self, count: int, now: float) -> None:
        """Want those again that were let go lately, as far as there are fewer than ``count``."""
        kept = [member for member in self.members if member.leaving is not None and member.leaving > now]
        for member in kept[: max(0, count - len(self.wanted()))]:
            member.leaving = None

    def let_go(self, count: int, work: Mapping[str, int], until: float, now: float) -> None:
        """Keep ``count``; the others stay until ``until``, those that have yet to start go at once."""
        wanted = self.wanted()
        facts = {member.name: scale_in.Facts(work=work.get(member.name, 0)) for member in wanted}
        for member in scale_in.order(wanted, facts)[: max(0, len(wanted) - count)]:
            if member.ready:
                member.leaving = until
            else:
                self.end(member, now)

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
        #: How many groups of each role serve, from which moment on.
        self.course: list[tuple[float, Pair]] = []

    def begin(self, pair: Pair) -> None:
        """Have the first groups, which serve from the start."""
        self.target = pair
        for side, count in zip(self._sides, pair, strict=True):
            for _ in range(count):
                side.order(0.0).ready = True
        self._changed()
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
        now = self._clock.now
        self.target = pair
        for side, count in zip(self._sides, pair, strict=True):
            side.take_back(count, now)
            side.let_go(count, work, now + self._life.window, now)
        self._release()
        for side, count, gpus in zip(self._sides, pair, self._life.gpus, strict=True):
            while len(side.wanted()) < count and self._room(gpus):
                self._start(side)
        self._changed()

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

    def _room(self, gpus: int) -> bool:
        """Return whether the budget holds one more group with so many GPUs."""
        held = sum(len(side.members) * each for side, each in zip(self._sides, self._life.gpus, strict=True))
        return self._life.budget is None or held + gpus <= self._life.budget

    def _start(self, side: Side[Any]) -> None:
        member = side.order(self._clock.now)

        def ready() -> None:
            if member in side.members:
                member.ready = True
                self._changed()

        self._clock.at(self._clock.now + self._life.start, ready)

    def _lose(self, loss: Loss) -> None:
        side = self._sides[protocol.ROLES.index(loss.role)]
        lost = side.lose(loss.count, self._clock.now)
        self._changed()
        for member in lost:
            member.engine.lose()
        self.resize(self.target, {})

    def _changed(self) -> None:
        prefill, decode = self.prefill.settle(), self.decode.settle()
        if prefill or decode:
            self.course.append((self._clock.now, self.serving()))
            self._told()
