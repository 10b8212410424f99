"""One router process's choices: the policy, and what it has learnt about workers. No I/O; equal inputs, equal choices.

It turns books and index into the candidates of :mod:`twinpool.router.logic.policy`. The load of a worker is that of
all processes that route to it, as far as the ledger knows it.
"""

from __future__ import annotations

import itertools
from heapq import nlargest
from typing import TYPE_CHECKING

from msgspec.structs import replace

from twinpool.core.economics import ASSUMED
from twinpool.router.logic import policy, price
from twinpool.router.logic.asked import Asked, First, Work
from twinpool.router.logic.distances import Distances
from twinpool.router.logic.foresight import Foresight
from twinpool.router.logic.index_approximate import ApproximateIndex
from twinpool.router.logic.index_text import BLOCK_BYTES, bytes_of, chain, text_of
from twinpool.router.logic.index_view import Cached, ExactView
from twinpool.router.logic.policy import Ask, Candidate
from twinpool.router.logic.ranks import Ranks
from twinpool.router.logic.request import BYTES_PER_TOKEN, prompt_ids
from twinpool.router.logic.residency import Residency
from twinpool.router.logic.seats import endpoint_of
from twinpool.router.logic.sessions import Sessions

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence
    from random import Random

    from twinpool.core.protocol import Policy, RouterConfig
    from twinpool.router.logic.decisions import Decisions
    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.logic.index_exact import Held
    from twinpool.router.logic.ledger import Ledger
    from twinpool.router.logic.request import Request

#: Blocks of text that are remembered: 4 MiB of table, and 130 million bytes of prompts.
INDEX_BLOCKS = 2**18

_NOTHING = Cached()
#: The least share of a time foretold that is learnt from where a first token came sooner than its step should take.
_SHORTEST = 1 / 16


class Chooser:
    """See the module."""

    def __init__(self, config: RouterConfig, ledger: Ledger, rng: Random) -> None:
        self._policy: Policy = config.policy
        self._conditional = config.conditional
        self._ttft = config.ttft
        self._disaggregated = config.disaggregated
        self._ledger = ledger
        self._rng = rng
        # Copies of a router that all began with the first worker would all meet there.
        self._turns = {"prefill": rng.randrange(1024), "decode": rng.randrange(1024)}
        #: Whether choices depend on what workers hold: where they do not, nothing is learnt of it.
        self._aware = config.policy in policy.PREFIX_AWARE or config.conditional == "auto"
        self.index = ApproximateIndex(INDEX_BLOCKS if self._aware else 0)
        self.exact = ExactView()
        self.foresight = Foresight()
        self.sessions = Sessions()
        self.distances = Distances()
        self.residency = Residency(config.adapter_slots)
        #: Engines name an adapter's blocks by its name and its source.
        self._adapters = {pair[0]: pair for pair in zip(config.adapters, config.adapter_sources, strict=False)}
        #: What was chosen lately; None while nobody looks.
        self.decisions: Decisions | None = None
        self.ranks = Ranks(ledger, self.exact)
        #: Places by id in the workers that were chosen from last, where they are many.
        self._places: tuple[Sequence[Endpoint], dict[str, int]] = ((), {})

    def asked(self, request: Request, session: int = 0, now: float = 0.0) -> Asked:
        """Return what choices need of a request; its text is only read where a choice depends on it.

        ``session`` is what :func:`twinpool.router.logic.sessions.name_of` says.
        """
        ask = Ask(request.prompt_tokens, request.output_tokens)
        if not self._aware:
            return Asked(ask)
        # A body without room for a block has no text of one.
        keys = (
            chain(text_of(request.fields, request.adapter, request.shrunk)) if len(request.body) > BLOCK_BYTES else ()
        )
        # Without its source an adapter's blocks cannot be named.
        nameable = not request.adapter or request.adapter in self._adapters
        ids = prompt_ids(request.fields) if self.exact.size and nameable else None
        if ids is None:
            asked = Asked(ask, keys)
        else:
            names = self.exact.names(ids, request.fields, self._adapters.get(request.adapter))
            asked = Asked(Ask(max(1, len(ids)), ask.output), keys, names)
        if request.adapter and self.residency.slots:
            asked = replace(asked, adapter=request.adapter)
        if session:
            asked = replace(asked, session=session, returned=self.sessions.held(session, keys, now), came=now)
        return asked

    def rendered(self, asked: Asked, ids: list[int], request: Request) -> Asked:
        """Return what choices need of a request whose prompt has turned out to be these token ids."""
        return replace(asked, ask=Ask(len(ids), asked.ask.output), names=self.exact.names(ids, request.fields))

    def stake(self, asked: Asked, workers: Sequence[Endpoint]) -> float:
        """Return the seconds that a prefill could cost less if it were known what ``workers`` hold of it."""
        if not self.exact.size or not workers:
            return 0.0
        chosen, candidates = self._candidates(asked, workers)
        if self.ranks.seats:  # the estimate is of a worker; the engine chooses a rank that may have nothing of it
            candidates = tuple(
                replace(one, cached=one.cached // worker.ranks, held=one.held // worker.ranks)
                for worker, one in zip(chosen, candidates, strict=True)
            )
        caches = [self.ranks.caches(worker) for worker in chosen]
        return price.at_stake(asked.ask, candidates, self.foresight.prices, caches)

    def saved(self, before: Asked, after: Asked, workers: Sequence[Endpoint]) -> float:
        """Return what the choice ``before`` it was known what ``workers`` hold would have cost more, in seconds."""
        prices = self.foresight.prices
        guessed, thought = self._candidates(replace(before, ask=after.ask), workers)
        costs = price.prefill_prices(after.ask, thought, prices)
        guess = guessed[costs.index(min(costs))]
        likely, _ = self._candidates(after, workers)
        others = [each for each in likely if not each.seat and each.id != guess.id]
        _, known = self._candidates(after, (guess, *others[: policy.MANY - 1]))
        costs = price.prefill_prices(after.ask, known, prices)
        return costs[0] - min(costs)

    def hands_off(self, asked: Asked, prefills: Sequence[Endpoint], decodes: Sequence[Endpoint]) -> bool:
        """Decide whether a request that could be split is; without a prefill worker the handoff's own rules say."""
        if self._conditional != "auto":
            return self._conditional == "always"
        if not prefills or not decodes:
            return True
        sources, prefill = self._candidates(asked, prefills)
        targets, decode = self._candidates(asked, decodes)
        decision = price.decide(
            asked.ask,
            prefill,
            decode,
            self.foresight.prices,
            self._rng,
            self._ttft,
            lambda place: self._seen_from(sources[place], targets, decode),
        )
        if self.decisions is not None:
            self.decisions.handoff(asked.ask, decision.prefill is not None, decision.saved)
        return decision.prefill is not None

    def prefill(self, asked: Asked, workers: Sequence[Endpoint]) -> Endpoint:
        """Choose one of ``workers``, which must not be empty, for the prefill; or one at one of its ranks."""
        if self._policy != "price" or (len(workers) == 1 and not self.ranks.seats):
            return self._simple(asked, workers, "prefill")
        priced, candidates = self._candidates(asked, workers)
        prices = self.foresight.prices
        place = price.cheapest_prefill(asked.ask, candidates, prices, self._rng, self._ttft, _last(asked, priced)).place
        if self.decisions is not None:
            costs = price.prefill_prices(asked.ask, candidates, prices)
            self.decisions.note("prefill", asked.ask, priced, place, candidates, costs)
        return priced[place]

    def decode(
        self, asked: Asked, workers: Sequence[Endpoint], whole: bool, source: Endpoint | None = None
    ) -> Endpoint:
        """Choose one of ``workers``, which must not be empty, for the answer, or for all of a request (``whole``).

        ``source`` is the worker that has prefilled.
        """
        if self._policy != "price" or (len(workers) == 1 and not self.ranks.seats):
            return self._simple(asked, workers, "decode")
        priced, candidates = self._candidates(asked, workers)
        if source is not None:
            candidates = self._seen_from(source, priced, candidates)
        choice, prices = price.cheapest_whole if whole else price.cheapest_decode, self.foresight.prices
        place = choice(asked.ask, candidates, prices, self._rng, last=_last(asked, priced)).place
        if self.decisions is not None:
            costs = [choice(asked.ask, (one,), prices, self._rng).price for one in candidates]
            name = "whole" if whole else "decode"
            self.decisions.note(name, asked.ask, priced, place, candidates, costs)
        return priced[place]

    def sent(self, asked: Asked, worker: Endpoint) -> Work:
        """A prefill goes to ``worker``: return what it is expected to be, and remember what the worker then holds."""
        before = (self._ledger.seen(worker.id) if worker.ranks == 1 else self.ranks.load(worker)).backlog
        if not self._aware:
            return Work(ASSUMED.prefill(asked.ask.prompt, 0), before, 0)
        cached = self._cached(asked, (worker,)).get(worker.id, _NOTHING)
        known = None
        if asked.held is not None:  # also where it is contradicted: only reports can win trust back
            known = self.exact.cached(worker.seat or worker.id, asked.held, asked.ask.prompt)
        self._remember(asked, worker)
        seconds = ASSUMED.prefill(asked.ask.prompt - cached.anywhere, cached.anywhere)
        return Work(seconds, before, cached.anywhere, known.device if known and known.sure else None)

    def received(self, asked: Asked, worker: Endpoint) -> None:
        """The KV of a prompt goes to ``worker``."""
        self._remember(asked, worker)

    def _remember(self, asked: Asked, worker: Endpoint) -> None:
        if asked.keys:
            self.index.learn(asked.keys, worker.id)
        if asked.adapter:
            self.residency.went(worker.id, asked.adapter)
        if asked.session:
            self.sessions.went(asked.session, worker.role, worker.id, asked.ask.prompt, asked.keys, asked.came)

    def expected(self, work: Work, worker: str = "") -> float:
        """Return the seconds that a prefill was expected to take, queueing included; 0 where nothing is priced."""
        if not self._aware:
            return 0.0
        return (work.before + work.seconds) * self.foresight.prefill.factor * self.foresight.pace(worker)

    def computing(self, work: Work, worker: str) -> float:
        """Return the seconds of it that are no queueing; 0 where nothing is priced."""
        return work.seconds * self.foresight.prefill.factor * self.foresight.pace(worker) if self._aware else 0.0

    def first(self, asked: Asked, worker: Endpoint, work: Work | None, source: Endpoint | None = None) -> First | None:
        """Foretell the first token of an answer by ``worker``: whole with ``work``, else handed over by ``source``.

        None where nothing is priced.
        """
        if not self._aware:
            return None
        load = self._ledger.seen(worker.id) if worker.ranks == 1 else self.ranks.load(worker)
        prices = self.foresight.prices
        step = prices.step(load.requests + 1, load.tokens + asked.ask.prompt)
        if work is not None:
            return First(self.expected(work, worker.id) + step, step=step, prefill=work.before + work.seconds)
        size = asked.ask.prompt * (1.0 if source is None else self.distances.far(source, worker))
        return First(prices.pull(size) + step, ASSUMED.pull(size), step)

    def came(self, worker: Endpoint, first: First, seconds: float, now: float) -> None:
        """The first token of an answer came ``seconds`` after ``worker`` was asked for it."""
        if self.foresight.enough(worker.id, now):
            return
        rest = seconds - first.step
        if first.pull:
            self.foresight.handed_over(first.pull, max(rest, first.pull * _SHORTEST))
        else:
            rest = max(rest, first.prefill * _SHORTEST)
            self.foresight.prefilled(worker.id, first.prefill, rest, typical=not self._disaggregated)

    def prefilled(self, worker: Endpoint, work: Work, seconds: float, cached: int | None) -> bool | None:
        """A prefill took ``seconds``, queueing included; the engine says that ``cached`` tokens were, if it says so.

        Return whether that is what KV events foretold; None when they foretold nothing.
        """
        if not self._aware:
            return None
        self.foresight.prefilled(worker.id, work.before + work.seconds, seconds)
        if cached is None:
            return None
        self.index.report(worker.id, work.cached, cached)
        return None if work.sure is None else self.exact.judge(worker.seat or worker.id, work.sure, cached)

    def emptied(self, worker: str) -> None:
        """A worker has lost all that it held, by its KV events."""
        self.index.forget(worker)

    def keep(self, known: Container[str]) -> None:
        """Forget workers that are gone."""
        self.index.keep(known)
        self.exact.keep(known)
        self.foresight.keep(known)
        self.distances.keep(known)
        self.residency.keep(known)

    def _simple(self, asked: Asked, workers: Sequence[Endpoint], role: str) -> Endpoint:
        self._turns[role] += 1
        if len(workers) == 1 and not self.ranks.seats:
            if self.decisions is not None:
                self.decisions.note(role, asked.ask, workers, 0)
            return workers[0]
        candidates: Sequence[Candidate] = ()
        match self._policy:
            case "round-robin":
                place = policy.round_robin(len(workers), self._turns[role])
            case "random":
                place = self._rng.randrange(len(workers))
            case "least-load":
                if len(workers) > policy.MANY:
                    workers = self._rng.choices(workers, k=policy.MANY)
                place = policy.least_load([self._ledger.seen(worker.id).tokens for worker in workers], self._rng)
            case _:
                workers, candidates = self._candidates(asked, workers)
                place = policy.longest_prefix(candidates, self._rng)
        if self.decisions is not None:
            self.decisions.note(role, asked.ask, workers, place, candidates)
        return workers[place]

    def _candidates(
        self, asked: Asked, workers: Sequence[Endpoint]
    ) -> tuple[Sequence[Endpoint], tuple[Candidate, ...]]:
        """Return the workers worth pricing, and what is known of each."""
        chosen = workers
        if len(workers) > policy.MANY:
            places = policy.shortlist(len(workers), self._holders(asked, workers), self._rng)
            chosen = [workers[place] for place in places]
        held = self._cached(asked, chosen)
        factor, pace_of, load_of = self.foresight.prefill.factor, self.foresight.pace, self._ledger.seen
        candidates = []
        for worker in chosen:
            name = worker.id
            load, pace = load_of(name), pace_of(name)
            cached = held.get(name, _NOTHING) if held else _NOTHING
            candidates.append(
                Candidate(
                    load.requests,
                    load.tokens,
                    load.backlog * factor * pace,
                    cached.device,
                    cached.anywhere,
                    worker.kv_tokens,
                    pace,
                )
            )
        if asked.adapter:
            loading, both = self.residency.load, zip(chosen, candidates, strict=True)
            candidates = [replace(one, load=loading(worker.id, asked.adapter)) for worker, one in both]
        if self.ranks.seats:
            return self.ranks.candidates(asked, chosen, candidates, factor)
        return chosen, tuple(candidates)

    def _seen_from(
        self, source: Endpoint, workers: Sequence[Endpoint], candidates: tuple[Candidate, ...]
    ) -> tuple[Candidate, ...]:
        """Return the candidates with how far each is from the worker that prefills, if that is known."""
        if source.place is None:
            return candidates
        far = self.distances.far
        return tuple(replace(one, far=far(source, worker)) for worker, one in zip(workers, candidates, strict=True))

    def _holders(self, asked: Asked, workers: Sequence[Endpoint]) -> Iterator[int]:
        """Yield the places of workers that hold something of a prompt: those known to, then those likely to."""
        if self._places[0] is not workers:  # the same sequence until workers come or go, or one is avoided
            self._places = workers, {worker.id: place for place, worker in enumerate(workers)}
        known = nlargest(policy.MANY, asked.held.items(), key=_held) if asked.held else []
        likely = self.index.holders(asked.keys, self._rng.randrange(2**16)) if asked.keys else ()
        for name in itertools.chain(asked.returned or (), (name for name, _ in known), likely):
            place = self._places[1].get(endpoint_of(name) if self.ranks.seats else name)
            if place is not None:
                yield place

    def _cached(self, asked: Asked, workers: Sequence[Endpoint]) -> dict[str, Cached]:
        """Return what workers hold of a prompt, by events or by the estimate; engines always compute the last token."""
        found: dict[str, Cached] = {}
        if asked.held is None:
            if not asked.keys and not asked.returned:  # a short prompt, or nothing that anybody knows of
                return found
        else:
            found = (self.ranks if self.ranks.seats else self.exact).found(workers, asked.held, asked.ask.prompt)
        rest = [worker.id for worker in workers if worker.id not in found]
        if asked.keys and rest:
            most, index = asked.ask.prompt - 1, self.index
            for worker, depth in index.depths(asked.keys, rest).items():
                tokens = min(most, int(bytes_of(depth) * index.share(worker)) // BYTES_PER_TOKEN)
                found[worker] = Cached(tokens, tokens)
        if asked.returned:
            self._add_returned(asked.ask, asked.returned, rest, found)
        return found

    def _add_returned(
        self, ask: Ask, returned: Mapping[str, int], estimated: Sequence[str], found: dict[str, Cached]
    ) -> None:
        """Add what a session's last workers hold beyond what text blocks say, where only those say something."""
        for worker in estimated:
            tokens = min(ask.prompt - 1, int(returned.get(worker, 0) * self.index.share(worker)))
            if tokens > found.get(worker, _NOTHING).anywhere:
                found[worker] = Cached(tokens, tokens)


def _last(asked: Asked, workers: Sequence[Endpoint]) -> int | None:
    """Return the place of the worker that the session was at last, if it is among ``workers``."""
    if not asked.returned:
        return None
    return next((place for place, worker in enumerate(workers) if worker.id in asked.returned), None)


def _held(found: tuple[str, Held]) -> int:
    return max(found[1].anywhere, found[1].expected)
