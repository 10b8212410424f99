"""Simulated routers: each chooses with its own books, by the functions that choose in production. Virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from random import Random
from typing import TYPE_CHECKING

from twinpool.core.economics import ASSUMED
from twinpool.core.protocol import RouterConfig
from twinpool.router.logic import policy, price
from twinpool.router.logic.asked import Work
from twinpool.router.logic.ledger import Load
from twinpool.router.logic.meter import Meter
from twinpool.router.logic.places import Elsewhere, Places, places
from twinpool.router.logic.policy import Ask, Candidate
from twinpool.simulate.admission import Admission
from twinpool.simulate.rules import OURS, RULES, Seen
from twinpool.simulate.views import View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.router.logic.arrivals import Arrivals
    from twinpool.simulate.engines import Job, PrefillWorker
    from twinpool.simulate.fleet import Member
    from twinpool.simulate.pool import Pool, Setup
    from twinpool.simulate.traces import Request

_UNKNOWN = Work(0.0, 0.0, 0)
_ANY = 10**9
_NOWHERE = (0, 0)


@dataclass(slots=True)
class Books:
    """What one router knows of one worker's work: its own, as in the router's ledger."""

    requests: int = 0
    tokens: int = 0
    uncached: int = 0
    seconds: float = 0.0
    #: ``seconds`` as the prices have it that routers assume before they know their engines.
    assumed: float = 0.0


_IDLE = Books()


def _sum(several: Sequence[Books]) -> Books:
    """Return the books of several routers of one worker, added up."""
    return Books(
        sum(books.requests for books in several),
        sum(books.tokens for books in several),
        sum(books.uncached for books in several),
        sum(books.seconds for books in several),
    )


@dataclass(frozen=True, slots=True)
class Report:
    """What a router tells the operator.

    ``waiting``: requests in its queue; ``prefill``: seconds of prefill that it has sent and not seen done;
    ``decoding``: requests that it has at decode groups; ``tokens``: what it has sent each group and not seen finished.
    """

    arrivals: Arrivals
    waiting: int
    prefill: float
    decoding: int
    tokens: dict[str, int]


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
        #: By name, of all groups that there are; those that serve also in the order in which they are chosen from.
        self._books: dict[str, Books] = {}
        self._prefill: list[Books] = []
        self._decode: list[Books] = []
        self._prefill_names: list[str] = []
        self._decode_names: list[str] = []
        #: Places of decode groups by revision: KV goes over within one.
        self._sinks: dict[str, list[int]] = {}
        #: What the others had when they were heard of last.
        self._heard: dict[str, Books] = {}
        self._prefill_elsewhere: list[Books] = []
        self._decode_elsewhere: list[Books] = []
        #: By how much the own books are multiplied.
        self._share = setup.routers if setup.exchange is None else 1
        # Events tell everybody of every cache; what was learnt from one's own requests nobody else knows.
        self._view = View(pool.events)
        #: Its queue, where it has one, and what that is told of the pool.
        self._admission = (
            None if setup.queue is None else Admission(pool.clock, setup.queue, setup.ttft or inf, self._route)
        )
        self._config = _config(setup)
        #: What it counts for the operator, where somebody asks.
        self.meter = Meter(self) if setup.scaling is not None else None
        self.follow()

    def follow(self) -> None:
        """Choose from now on among the groups that serve."""
        fleet = self._pool.fleet
        names = [member.name for side in (fleet.prefill, fleet.decode) for member in side.members]
        self._books = {name: self._books.get(name) or Books() for name in names}
        self._prefill = [self._books[member.name] for member in self._pool.prefill]
        self._decode = [self._books[member.name] for member in self._pool.decode]
        self._prefill_names = [member.name for member in self._pool.prefill]
        self._decode_names = [member.name for member in self._pool.decode]
        self._sinks = {}
        for place, member in enumerate(self._pool.decode):
            self._sinks.setdefault(member.revision, []).append(place)
        self._lay_out()
        if self.meter is not None:
            self.meter.keep(self._books)

    def _lay_out(self) -> None:
        self._prefill_elsewhere = [self._heard.get(name, _IDLE) for name in self._prefill_names]
        self._decode_elsewhere = [self._heard.get(name, _IDLE) for name in self._decode_names]
        if self._admission is not None:
            self._admission.resize(self._places())

    def _places(self) -> Places:
        """Return what it may have at the workers; while it hears nothing of the others, its equal share."""
        prefill, decode, others = self._pool.prefill, self._pool.decode, self._setup.routers - 1
        if not decode:
            return Places(_ANY)  # who comes waits for a group then, not for room
        loads = {
            name: Load(requests=books.requests, prefill=round(books.seconds * 1e6))
            for name, books in self._heard.items()
        }
        elsewhere = Elsewhere(loads, others, others if self._setup.exchange is None else 0)
        return places(self._config, prefill, decode, elsewhere, 1)

    def listen(self, routers: Sequence[Router]) -> None:
        """Hear what all others have now."""
        others = [router._books for router in routers if router is not self]
        self._heard = {name: _sum([books[name] for books in others]) for name in self._books}
        self._lay_out()

    def seen(self, endpoint: str) -> Load:
        """Return all work of a group that it knows of, as the router's ledger would."""
        own, others = self._books.get(endpoint, _IDLE), self._heard.get(endpoint, _IDLE)
        return Load(
            tokens=own.tokens * self._share + others.tokens, requests=own.requests * self._share + others.requests
        )

    def report(self) -> Report:
        """Return what it would tell the operator."""
        assert self.meter is not None
        decodes = [self._books.get(member.name, _IDLE) for member in self._pool.fleet.decode.members]
        return Report(
            self.meter.arrivals,
            0 if self._admission is None else self._admission.waiting,
            sum(books.assumed for books in self._books.values()),
            sum(books.requests for books in decodes),
            {name: books.tokens for name, books in self._books.items()},
        )

    def arrive(self, job: Job) -> None:
        """Take a request of a client."""
        if self.meter is not None:
            self.meter.arrived(Ask(job.request.prompt, job.request.output))
        job.again = lambda: self._again(job)
        if self._admission is None:
            self._route(job)
        else:
            self._admission.enter(job)

    def _again(self, job: Job) -> None:
        """Send a request elsewhere; it keeps its place."""
        if self._admission is not None:
            self._admission.keep(job)
        self._route(job)

    def _route(self, job: Job) -> None:
        """Send a request on its way; while a role has no group that serves, it waits for one."""
        if not self._prefill or not self._decode:
            self._pool.waiting.append(job)
            return
        request = job.request
        ask = Ask(request.prompt, request.output)
        candidates = self._prefill_candidates(request)
        place = None
        # Decode groups without a place left have no time for prompts: what they lose, everybody waits for.
        if self._setup.conditional and not (self._admission is not None and self._admission.crowded):
            decodes, prices = self._decode_candidates(request), self._setup.prices
            decision = price.decide(ask, candidates, decodes, prices, self._rng, self._setup.ttft)
            if decision.prefill is None:
                self._whole(job, ask, decodes)
                return
            place = decision.prefill.place if self._setup.rule == OURS else None
        if place is None:
            place = self._ruled(ask, candidates)
        self._hand_off(job, ask, place, candidates[place])

    def _ruled(self, ask: Ask, candidates: Sequence[Candidate]) -> int:
        """Return the prefill group that the rule chooses."""
        both = zip(self._prefill, self._prefill_elsewhere, strict=True)
        uncached = [books.uncached * self._share + others.uncached for books, others in both]
        self._turn += 1
        return self._rule(Seen(ask, candidates, uncached, self._setup.prices, self._turn, self._rng, self._setup.ttft))

    def _hand_off(self, job: Job, ask: Ask, place: int, candidate: Candidate) -> None:
        cached = candidate.cached
        books, member = self._prefill[place], self._pool.prefill[place]
        seconds = self._setup.prices.warm(ask.prompt, cached, candidate.held)
        wait = books.seconds * self._share + self._prefill_elsewhere[place].seconds + seconds
        sure = self._view.sent(member.name, job.request.blocks, wait)
        work, sent = self._work(books, self._prefill_elsewhere[place], ask, cached), self._pool.clock.now
        _add(books, 1, ask.prompt, ask.prompt - cached, seconds, work.seconds)
        if self._admission is not None and self._setup.aware:
            self._admission.sent(job, seconds)

        def prefilled() -> None:
            if self._admission is not None:
                self._admission.computed(job)
            _add(books, -1, -ask.prompt, cached - ask.prompt, -seconds, -work.seconds)
            self._view.reported(member.name, cached, sure, job.hit)
            if self.meter is not None:
                self.meter.prefilled(member, work, ask.prompt, self._pool.clock.now - sent, job.hit)
            self._start_decode(job, ask, member)

        job.prefilled = prefilled
        member.engine.submit(job)

    def _work(self, books: Books, others: Books, ask: Ask, cached: int) -> Work:
        """Return a prefill as a router foretells it that does not know its engines yet; nothing where nobody asks."""
        if self.meter is None:
            return _UNKNOWN
        before = books.assumed * self._share + others.assumed
        return Work(ASSUMED.prefill(ask.prompt - cached, cached), before, cached)

    def _start_decode(self, job: Job, ask: Ask, source: Member[PrefillWorker]) -> None:
        places = self._sinks.get(source.revision)
        if places is None:
            source.engine.let_go()
            job.again()
            return
        candidates = self._decode_candidates(job.request)
        if len(places) < len(candidates):
            candidates = [candidates[place] for place in places]
        place = places[self._sink(ask, candidates)]
        self._view.sent(self._decode_names[place], job.request.blocks)
        self._write(job, ask, place, 0.0, source.engine)

    def _sink(self, ask: Ask, candidates: Sequence[Candidate]) -> int:
        """Return which of these decode groups takes over."""
        if self._setup.rule == OURS:
            return price.cheapest_decode(ask, candidates, self._setup.prices, self._rng).place
        if self._setup.rule == "round-robin":
            return policy.round_robin(len(candidates), self._turn)
        if self._setup.rule == "random":
            return self._rng.randrange(len(candidates))
        return policy.least_load([candidate.tokens for candidate in candidates], self._rng)

    def _whole(self, job: Job, ask: Ask, candidates: Sequence[Candidate]) -> None:
        chosen = price.cheapest_whole(ask, candidates, self._setup.prices, self._rng)
        books, name = self._decode[chosen.place], self._decode_names[chosen.place]
        sure = self._view.sent(name, job.request.blocks)
        cached = candidates[chosen.place].cached
        seconds = self._setup.prices.prefill(ask.prompt - cached, cached)
        assumed = self._work(books, _IDLE, ask, cached).seconds
        books.assumed += assumed

        def prefilled() -> None:
            _add(books, 0, 0, 0, -seconds, -assumed)
            self._view.reported(name, cached, sure, job.hit)

        job.prefilled = prefilled
        self._write(job, ask, chosen.place, seconds, None)

    def _write(self, job: Job, ask: Ask, place: int, seconds: float, source: PrefillWorker | None) -> None:
        """Have a decode group write the answer, after ``seconds`` of prefill where it reads the prompt too."""
        books, member = self._decode[place], self._pool.decode[place]
        _add(books, 1, ask.prompt + ask.output, 0, seconds)

        def finished() -> None:
            _add(books, -1, -ask.prompt - ask.output, 0, 0.0)
            if self._admission is not None:
                self._admission.leave(job)
            if self.meter is not None and job.finish < inf:
                apart = (job.finish - job.first) / (ask.output - 1) if ask.output > 1 else 0.0
                self.meter.wrote(member, ask.output, apart)

        job.finished = finished
        member.engine.submit(job, source)

    def _prefill_candidates(self, request: Request) -> list[Candidate]:
        return self._candidates(request, self._prefill, self._prefill_elsewhere, self._prefill_names, 0)

    def _decode_candidates(self, request: Request) -> list[Candidate]:
        capacity = self._setup.decode_capacity
        return self._candidates(request, self._decode, self._decode_elsewhere, self._decode_names, capacity)

    def _candidates(
        self, request: Request, own: Sequence[Books], elsewhere: Sequence[Books], names: Sequence[str], capacity: int
    ) -> list[Candidate]:
        held = self._view.cached(request.blocks, names) if request.blocks else {}
        share, most = self._share, request.prompt - 1
        found = []
        for books, others, name in zip(own, elsewhere, names, strict=True):
            device, anywhere = held.get(name, _NOWHERE)
            backlog = max(0.0, books.seconds * share + others.seconds)
            requests, tokens = books.requests * share + others.requests, books.tokens * share + others.tokens
            found.append(Candidate(requests, tokens, backlog, min(device, most), min(anywhere, most), capacity))
        return found


def _config(setup: Setup) -> RouterConfig:
    """Return what a router is told of its pool, as far as its places depend on it."""
    concurrency = setup.queue.concurrency if setup.queue is not None else 0
    return RouterConfig(
        pool="simulated", namespace="", models=(), queue_concurrency=concurrency, sequences=setup.sequences or 0,
        ttft=setup.ttft, conditional="auto" if setup.conditional else "always",
    )  # fmt: skip


def _add(books: Books, requests: int, tokens: int, uncached: int, seconds: float, assumed: float = 0.0) -> None:
    books.requests += requests
    books.tokens += tokens
    books.uncached += uncached
    books.seconds += seconds
    books.assumed += assumed
