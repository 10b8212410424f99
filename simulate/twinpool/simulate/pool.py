"""A pool in virtual time: routers with books of their own, prefill and decode workers, and what became of requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from twinpool.router.logic import policy, price
from twinpool.router.logic.policy import Ask, Candidate
from twinpool.simulate.cache import Cache
from twinpool.simulate.clock import Clock
from twinpool.simulate.engines import DecodeWorker, Job, Link, PrefillWorker
from twinpool.simulate.rules import OURS, RULES, Seen
from twinpool.simulate.traces import BLOCK_TOKENS
from twinpool.simulate.views import Events, View

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twinpool.core.economics import Prices
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


@dataclass(slots=True)
class Books:
    """What one router knows of one worker's work: its own, as in the router's ledger."""

    requests: int = 0
    tokens: int = 0
    uncached: int = 0
    seconds: float = 0.0


def _sum(several: Sequence[Sequence[Books]]) -> list[Books]:
    """Return the books of several routers by worker, added up."""
    return [
        Books(
            sum(books.requests for books in of_one),
            sum(books.tokens for books in of_one),
            sum(books.uncached for books in of_one),
            sum(books.seconds for books in of_one),
        )
        for of_one in zip(*several, strict=True)
    ]


class Router:
    """One copy: chooses with its own books, and with what it last heard of those of others.

    Where it hears nothing, it assumes that its copies have as much in theirs as it has itself.
    """

    def __init__(self, setup: Setup, pool: Pool, seed: int) -> None:
        self._setup = setup
        self._pool = pool
        self._rule = RULES[setup.rule]
        self._rng = Random(seed)  # noqa: S311 - spreads load
        self._turn = self._rng.randrange(1024)
        self._prefill = [Books() for _ in range(setup.prefill)]
        self._decode = [Books() for _ in range(setup.decode)]
        #: What the others had when they were heard of last.
        self._prefill_elsewhere = [Books() for _ in range(setup.prefill)]
        self._decode_elsewhere = [Books() for _ in range(setup.decode)]
        #: By how much the own books are multiplied.
        self._share = setup.routers if setup.exchange is None else 1
        # Events tell everybody of every cache; what was learnt from one's own requests nobody else knows.
        self._view = View(pool.events)

    def listen(self, routers: Sequence[Router]) -> None:
        """Hear what all others have now."""
        others = [router for router in routers if router is not self]
        self._prefill_elsewhere = _sum([router._prefill for router in others])
        self._decode_elsewhere = _sum([router._decode for router in others])

    def route(self, job: Job) -> None:
        """Send a request on its way."""
        request = job.request
        ask = Ask(request.prompt, request.output)
        candidates = self._prefill_candidates(request)
        if self._setup.conditional:
            decodes, prices = self._decode_candidates(request), self._setup.prices
            writing = [price.decode_price(ask, one, prices) for one in decodes]
            decision = price.decide(ask, candidates, decodes, prices, self._rng, self._setup.ttft, writing)
            if decision.prefill is None:
                self._whole(job, ask, decodes, writing)
                return
            place = decision.prefill.place
        else:
            both = zip(self._prefill, self._prefill_elsewhere, strict=True)
            uncached = [books.uncached * self._share + others.uncached for books, others in both]
            self._turn += 1
            place = self._rule(
                Seen(ask, candidates, uncached, self._setup.prices, self._turn, self._rng, self._setup.ttft)
            )
        self._hand_off(job, ask, place, candidates[place].cached)

    def _hand_off(self, job: Job, ask: Ask, place: int, cached: int) -> None:
        books, worker, name = self._prefill[place], self._pool.prefill[place], self._pool.prefill_names[place]
        seconds = self._setup.prices.prefill(ask.prompt - cached, cached)
        wait = books.seconds * self._share + self._prefill_elsewhere[place].seconds + seconds
        sure = self._view.sent(name, job.request.blocks, wait)
        _add(books, 1, ask.prompt, ask.prompt - cached, seconds)

        def prefilled() -> None:
            _add(books, -1, -ask.prompt, cached - ask.prompt, -seconds)
            self._view.reported(name, cached, sure, job.hit)
            self._start_decode(job, ask, worker)

        job.prefilled = prefilled
        worker.submit(job)

    def _start_decode(self, job: Job, ask: Ask, source: PrefillWorker) -> None:
        candidates = self._decode_candidates(job.request)
        if self._setup.rule == OURS:
            place = price.cheapest_decode(ask, candidates, self._setup.prices, self._rng).place
        elif self._setup.rule == "round-robin":
            place = policy.round_robin(len(candidates), self._turn)
        elif self._setup.rule == "random":
            place = self._rng.randrange(len(candidates))
        else:
            place = policy.least_load([candidate.tokens for candidate in candidates], self._rng)
        books = self._decode[place]
        self._view.sent(self._pool.decode_names[place], job.request.blocks)
        _add(books, 1, ask.prompt + ask.output, 0, 0.0)
        job.finished = lambda: _add(books, -1, -ask.prompt - ask.output, 0, 0.0)
        self._pool.decode[place].submit(job, source)

    def _whole(self, job: Job, ask: Ask, candidates: Sequence[Candidate], writing: Sequence[float]) -> None:
        chosen = price.cheapest_whole(ask, candidates, self._setup.prices, self._rng, writing)
        books, name = self._decode[chosen.place], self._pool.decode_names[chosen.place]
        sure = self._view.sent(name, job.request.blocks)
        cached = candidates[chosen.place].cached
        seconds = self._setup.prices.prefill(ask.prompt - cached, cached)
        _add(books, 1, ask.prompt + ask.output, 0, seconds)

        def prefilled() -> None:
            _add(books, 0, 0, 0, -seconds)
            self._view.reported(name, cached, sure, job.hit)

        job.prefilled = prefilled
        job.finished = lambda: _add(books, -1, -ask.prompt - ask.output, 0, 0.0)
        self._pool.decode[chosen.place].submit(job, None)

    def _prefill_candidates(self, request: Request) -> list[Candidate]:
        return self._candidates(request, self._prefill, self._prefill_elsewhere, self._pool.prefill_names, 0)

    def _decode_candidates(self, request: Request) -> list[Candidate]:
        capacity = self._setup.decode_capacity
        return self._candidates(request, self._decode, self._decode_elsewhere, self._pool.decode_names, capacity)

    def _candidates(
        self, request: Request, own: Sequence[Books], elsewhere: Sequence[Books], names: Sequence[str], capacity: int
    ) -> list[Candidate]:
        held = self._view.cached(request.blocks, names) if request.blocks else {}
        share, most = self._share, request.prompt - 1
        found = []
        for books, others, name in zip(own, elsewhere, names, strict=True):
            cached = min(held.get(name, 0), most)
            backlog = max(0.0, books.seconds * share + others.seconds)
            requests, tokens = books.requests * share + others.requests, books.tokens * share + others.tokens
            found.append(Candidate(requests, tokens, backlog, cached, cached, capacity))
        return found


def _add(books: Books, requests: int, tokens: int, uncached: int, seconds: float) -> None:
    books.requests += requests
    books.tokens += tokens
    books.uncached += uncached
    books.seconds += seconds


class Pool:
    """The workers, and what routers believe of their caches."""

    def __init__(self, setup: Setup, clock: Clock) -> None:
        self.clock = clock
        self.events = Events(setup.index, clock, Random(setup.seed))  # noqa: S311 - loses events
        self.prefill_names = [f"p{number}" for number in range(setup.prefill)]
        self.decode_names = [f"d{number}" for number in range(setup.decode)]
        blocks = setup.prefill_cache // BLOCK_TOKENS
        self.prefill = [
            PrefillWorker(clock, setup.prices, Cache(blocks, self.events.listener(name))) for name in self.prefill_names
        ]
        # What a decode worker does not need for sequences holds the blocks of those that ended: half, on average.
        half, prices = setup.decode_capacity // BLOCK_TOKENS // 2, setup.decode_prices or setup.prices
        self.decode = [
            DecodeWorker(
                clock,
                prices,
                setup.decode_capacity,
                Cache(half, self.events.listener(name)),
                Link() if setup.both_links else None,
            )
            for name in self.decode_names
        ]


def _exchange(routers: Sequence[Router]) -> None:
    for router in routers:
        router.listen(routers)


def simulate(trace: Sequence[Request], setup: Setup, progress: Callable[[int], None] | None = None) -> list[Job]:
    """Return what became of every request of ``trace``. The same setup gives the same result.

    ``progress`` is told now and then how many requests have arrived.
    """
    clock = Clock()
    pool = Pool(setup, clock)
    routers = [Router(setup, pool, setup.seed * 1000 + number) for number in range(setup.routers)]
    if setup.exchange is not None and setup.routers > 1 and trace:
        for number in range(int(trace[-1].arrival / setup.exchange) + 1):
            clock.at(number * setup.exchange, lambda: _exchange(routers))
    rng = Random(setup.seed + 1)  # noqa: S311 - clients choose any router
    jobs = [Job(request) for request in trace]
    coming = iter(sorted(jobs, key=lambda job: job.request.arrival))

    def arrive(number: int, job: Job) -> None:
        # One arrival plans the next: a day of requests would fill the clock.
        expect(number + 1)
        if progress is not None and number % _PROGRESS == 0:
            progress(number)
        routers[rng.randrange(len(routers))].route(job)

    def expect(number: int) -> None:
        if job := next(coming, None):
            clock.at(job.request.arrival, partial(arrive, number, job))

    expect(0)
    clock.run()
    return jobs
