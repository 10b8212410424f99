"""One router process's choices: the policy, and what it has learnt about workers. No I/O; equal inputs, equal choices.

It turns books and index into the candidates of :mod:`twinpool.router.logic.policy`. A process sees its own requests
only, so it takes the load of a worker to be its own times the number of processes that route alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.core.correction import Correction, learn
from twinpool.core.economics import ASSUMED
from twinpool.router.logic import policy, price
from twinpool.router.logic.index_approximate import ApproximateIndex
from twinpool.router.logic.index_text import BLOCK_BYTES, chain, text_of
from twinpool.router.logic.policy import Ask, Candidate
from twinpool.router.logic.request import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from random import Random

    from twinpool.core.economics import Prices
    from twinpool.core.protocol import Policy, RouterConfig
    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.logic.ledger import Ledger
    from twinpool.router.logic.request import Request

#: Blocks of text that are remembered: 4 MiB of table, and 130 million bytes of prompts.
INDEX_BLOCKS = 2**18


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as choices see it: its size, and the keys of its text blocks (none where nothing asks for them)."""

    ask: Ask
    keys: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Work:
    """What a prefill was expected to be when it was sent: by the model alone, in seconds, and tokens thought cached.

    ``before`` is what the worker had to do first.
    """

    seconds: float
    before: float
    cached: int


class Chooser:
    """See the module. ``copies``: processes that route to the same workers in the same way, this one included."""

    def __init__(self, config: RouterConfig, ledger: Ledger, rng: Random, copies: int = 1) -> None:
        self._policy: Policy = config.policy
        self._conditional = config.conditional
        self._ledger = ledger
        self._rng = rng
        self._copies = copies
        # Copies of a router that all began with the first worker would all meet there.
        self._turns = {"prefill": rng.randrange(1024), "decode": rng.randrange(1024)}
        self._aware = config.policy in policy.PREFIX_AWARE or config.conditional == "auto"
        self.index = ApproximateIndex(INDEX_BLOCKS if self._aware else 0)
        self.correction = Correction()

    def asked(self, request: Request) -> Asked:
        """Return what choices need of a request; its text is only read where a choice depends on it."""
        ask = Ask(request.prompt_tokens, request.output_tokens)
        return Asked(ask, chain(text_of(request.fields))) if self._aware else Asked(ask)

    def hands_off(self, asked: Asked, prefills: Sequence[Endpoint], decodes: Sequence[Endpoint]) -> bool:
        """Decide whether a request that could be split is; without a prefill worker the handoff's own rules say."""
        if self._conditional != "auto":
            return self._conditional == "always"
        if not prefills or not decodes:
            return True
        _, prefill = self._candidates(asked, prefills)
        _, decode = self._candidates(asked, decodes)
        return price.decide(asked.ask, prefill, decode, self._prices(), self._rng).prefill is not None

    def prefill(self, asked: Asked, workers: Sequence[Endpoint]) -> Endpoint:
        """Choose one of ``workers``, which must not be empty, for the prefill."""
        if self._policy != "price" or len(workers) == 1:
            return self._simple(asked, workers, "prefill")
        priced, candidates = self._candidates(asked, workers)
        return priced[price.cheapest_prefill(asked.ask, candidates, self._prices(), self._rng).place]

    def decode(self, asked: Asked, workers: Sequence[Endpoint], whole: bool) -> Endpoint:
        """Choose one of ``workers``, which must not be empty, for the answer, or for all of a request (``whole``)."""
        if self._policy != "price" or len(workers) == 1:
            return self._simple(asked, workers, "decode")
        priced, candidates = self._candidates(asked, workers)
        choice = price.cheapest_whole if whole else price.cheapest_decode
        return priced[choice(asked.ask, candidates, self._prices(), self._rng).place]

    def sent(self, asked: Asked, worker: Endpoint) -> Work:
        """A prefill goes to ``worker``: return what it is expected to be, and remember what the worker then holds."""
        cached = self._cached(asked, (worker,)).get(worker.id, 0)
        before = self._ledger[worker.id].backlog * self._copies
        if asked.keys:
            self.index.learn(asked.keys, worker.id)
        return Work(ASSUMED.prefill(asked.ask.prompt - cached, cached), before, cached)

    def received(self, asked: Asked, worker: Endpoint) -> None:
        """The KV of a prompt goes to ``worker``."""
        if asked.keys:
            self.index.learn(asked.keys, worker.id)

    def prefilled(self, worker: Endpoint, work: Work, seconds: float, cached: int | None) -> None:
        """A prefill took ``seconds``, queueing included; the engine says that ``cached`` tokens were, if it says so."""
        self.correction = learn(self.correction, work.before + work.seconds, seconds)
        if cached is not None:
            self.index.report(worker.id, work.cached, cached)

    def keep(self, known: Container[str]) -> None:
        """Forget workers that are gone."""
        self.index.keep(known)

    def _prices(self) -> Prices:
        return ASSUMED.scaled(self.correction.factor)

    def _simple(self, asked: Asked, workers: Sequence[Endpoint], role: str) -> Endpoint:
        self._turns[role] += 1
        if len(workers) == 1:
            return workers[0]
        match self._policy:
            case "round-robin":
                place = policy.round_robin(len(workers), self._turns[role])
            case "random":
                place = self._rng.randrange(len(workers))
            case "least-load":
                place = policy.least_load([self._ledger[worker.id].tokens for worker in workers], self._rng)
            case _:
                workers, candidates = self._candidates(asked, workers)
                place = policy.longest_prefix(candidates, self._rng)
        return workers[place]

    def _candidates(
        self, asked: Asked, workers: Sequence[Endpoint]
    ) -> tuple[Sequence[Endpoint], tuple[Candidate, ...]]:
        """Return the workers worth pricing, and what is known of each."""
        held = self._cached(asked, workers)
        chosen = policy.shortlist(workers, lambda worker: held.get(worker.id, 0), self._rng)
        factor = self.correction.factor * self._copies
        candidates = []
        for worker in chosen:
            load = self._ledger[worker.id]
            cached = held.get(worker.id, 0)
            candidates.append(
                Candidate(
                    requests=load.requests * self._copies,
                    tokens=load.tokens * self._copies,
                    backlog=load.backlog * factor,
                    cached=cached,
                    held=cached,
                )
            )
        return chosen, tuple(candidates)

    def _cached(self, asked: Asked, workers: Sequence[Endpoint]) -> dict[str, int]:
        """Return the prompt tokens that each worker probably holds; an engine always computes the last one."""
        if not asked.keys:
            return {}
        found = self.index.leading(asked.keys, [worker.id for worker in workers])
        most = asked.ask.prompt - 1
        return {worker: min(most, int(blocks * BLOCK_BYTES / BYTES_PER_TOKEN)) for worker, blocks in found.items()}
