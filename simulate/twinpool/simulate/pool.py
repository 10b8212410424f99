"""A pool in virtual time: routers with books of their own, prefill and decode workers, and what became of requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from twinpool.router.logic.policy import PREFIX_AWARE
from twinpool.simulate.cache import Cache
from twinpool.simulate.clock import Clock
from twinpool.simulate.engines import DecodeWorker, Job, Link, PrefillWorker
from twinpool.simulate.fleet import Fleet, Life
from twinpool.simulate.routers import Router
from twinpool.simulate.rules import OURS
from twinpool.simulate.scaler import Scaler
from twinpool.simulate.tiers import tiers_for
from twinpool.simulate.traces import BLOCK_TOKENS
from twinpool.simulate.views import Events

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twinpool.core.economics import Prices
    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.scaling import Pair
    from twinpool.simulate.admission import Limits
    from twinpool.simulate.drafting import Drafting
    from twinpool.simulate.fleet import Member
    from twinpool.simulate.scaler import Change
    from twinpool.simulate.tiers import TierSetup
    from twinpool.simulate.traces import Request
    from twinpool.simulate.views import Kind


#: Requests between two words of progress.
_PROGRESS = 200


@dataclass(frozen=True, slots=True)
class Setup:
    """A pool to simulate. Sizes in tokens, times in seconds."""

    prices: Prices
    prefill: int
    decode: int
    prefill_cache: int
    decode_capacity: int
    rule: str = OURS
    #: Whether a decode worker may prefill when that is cheaper.
    conditional: bool = False
    routers: int = 1
    #: Seconds between two looks of each router at the books of the others; None: they do not hear of each other.
    exchange: float | None = None
    index: Kind = "exact"
    seed: int = 0
    #: The objective for the first token, in seconds, as far as the rule knows it.
    ttft: float | None = None
    #: Prices of decode workers where their GPUs are others; ``prices`` are then those of prefill and of choices.
    decode_prices: Prices | None = None
    #: Whether pulls also wait for what the decode worker pulls already, not just for what the prefill worker sends.
    both_links: bool = False
    #: What befalls the groups, whose numbers are those above only at the beginning; and the pool whose ``scaling``
    #: decides how many there are, None: they stay as many.
    #: How many requests a decode group runs at once; None: as many as there is KV room for.
    sequences: int | None = None
    #: Slower memory behind the cache of each prefill group, and how decode groups draft tokens.
    tiers: tuple[TierSetup, ...] = ()
    drafting: Drafting | None = None
    #: The queue of each router; None: everything is sent to the workers at once.
    queue: Limits | None = None
    life: Life | None = None
    scaling: InferencePool | None = None

    @property
    def aware(self) -> bool:
        """Return whether routers price what they choose, or look at what workers hold."""
        return self.rule in PREFIX_AWARE or self.conditional


class Pool:
    """The workers, and what routers believe of their caches."""

    def __init__(self, setup: Setup, clock: Clock) -> None:
        self.setup = setup
        self.clock = clock
        self.events = Events(setup.index, clock, Random(setup.seed))  # noqa: S311 - loses events
        #: Tiers that all groups share.
        self._shared: dict[str, Cache] = {}
        self.fleet = Fleet(clock, setup.life or Life(), (self._prefill, self._decode), self._changed)
        #: The groups that requests are sent to.
        self.prefill: list[Member[PrefillWorker]] = []
        self.decode: list[Member[DecodeWorker]] = []
        #: Requests that came while a role had none.
        self.waiting: list[Job] = []
        self.routers: list[Router] = []
        self.fleet.begin((setup.prefill, setup.decode))

    def _prefill(self, name: str) -> PrefillWorker:
        blocks = self.setup.prefill_cache // BLOCK_TOKENS
        tiers = tiers_for(self.setup.tiers, self._shared, partial(self.events.listener, name))
        return PrefillWorker(self.clock, self.setup.prices, Cache(blocks, self.events.listener(name)), tiers)

    def _decode(self, name: str) -> DecodeWorker:
        # What a decode worker does not need for sequences holds the blocks of those that ended: half, on average.
        setup = self.setup
        half, prices = setup.decode_capacity // BLOCK_TOKENS // 2, setup.decode_prices or setup.prices
        link = Link() if setup.both_links else None
        cache = Cache(half, self.events.listener(name))
        return DecodeWorker(self.clock, prices, setup.decode_capacity, cache, link, setup.sequences, setup.drafting)

    def _changed(self) -> None:
        decodes = self.decode = self.fleet.decode.serving
        revisions = {member.revision for member in decodes}
        # KV goes over within a revision only.
        self.prefill = [member for member in self.fleet.prefill.serving if member.revision in revisions]
        for router in self.routers:
            router.follow()
        if self.prefill and self.decode:
            waiting, self.waiting = self.waiting, []
            for job in waiting:
                job.again()


@dataclass(frozen=True, slots=True)
class Played:
    """What became of every request; how many groups of each role served, from when on; and the GPU hours of all.

    ``changes`` are those of the numbers that were to be.
    """

    jobs: list[Job]
    course: tuple[tuple[float, Pair], ...]
    gpu_hours: float
    changes: tuple[Change, ...] = ()


def _exchange(routers: Sequence[Router]) -> None:
    for router in routers:
        router.listen(routers)


def simulate(trace: Sequence[Request], setup: Setup, progress: Callable[[int], None] | None = None) -> list[Job]:
    """Return what became of every request of ``trace``. The same setup gives the same result.

    ``progress`` is told now and then how many requests have arrived.
    """
    return play(trace, setup, progress).jobs


def play(trace: Sequence[Request], setup: Setup, progress: Callable[[int], None] | None = None) -> Played:
    """Return what became of every request of ``trace`` and of the groups; see :func:`simulate`."""
    clock = Clock()
    pool = Pool(setup, clock)
    routers = pool.routers = [Router(setup, pool, setup.seed * 1000 + number) for number in range(setup.routers)]
    last = trace[-1].arrival if trace else 0.0
    if setup.exchange is not None and setup.routers > 1 and trace:
        for number in range(int(last / setup.exchange) + 1):
            clock.at(number * setup.exchange, lambda: _exchange(routers))
    scaler = None
    if setup.scaling is not None:
        scaler = Scaler(setup.scaling, pool, routers, (setup.life or Life()).start)
        scaler.run(last)
    jobs = [Job(request) for request in trace]
    _arrivals(jobs, routers, clock, Random(setup.seed + 1), progress)  # noqa: S311 - clients choose any router
    clock.run()
    end = max([job.finish for job in jobs if job.finish < math.inf], default=0.0)
    changes = () if scaler is None else tuple(scaler.changes)
    return Played(jobs, tuple(pool.fleet.course), pool.fleet.gpu_hours(end), changes)


def _arrivals(
    jobs: Sequence[Job],
    routers: Sequence[Router],
    clock: Clock,
    rng: Random,
    progress: Callable[[int], None] | None,
) -> None:
    """Plan that every request comes to some router at its time."""
    coming = iter(sorted(jobs, key=lambda job: job.request.arrival))

    def arrive(number: int, job: Job) -> None:
        # One arrival plans the next: a day of requests would fill the clock.
        expect(number + 1)
        if progress is not None and number % _PROGRESS == 0:
            progress(number)
        routers[rng.randrange(len(routers))].arrive(job)

    def expect(number: int) -> None:
        if job := next(coming, None):
            clock.at(job.request.arrival, partial(arrive, number, job))

    expect(0)
