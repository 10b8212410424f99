"""What one router process counts and learns of the work that comes to it, for the operator's scaling.

Apart from choices: a policy that looks at no cache and no price still tells what arrives. Always true: nothing is
learnt from workers that were just started, nor from prefills that waited behind others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from twinpool.core.economics import ASSUMED
from twinpool.router.logic.arrivals import COLD_LEGS, Arrivals, HitRate

if TYPE_CHECKING:
    from collections.abc import Container

    from twinpool.router.logic.asked import Work
    from twinpool.router.logic.ledger import Load
    from twinpool.router.logic.policy import Ask


class Worker(Protocol):
    """Who answered."""

    @property
    def id(self) -> str:
        """Its identity, which changes when its engine restarts."""


class Loads(Protocol):
    """Where the work of workers stands."""

    def seen(self, endpoint: str) -> Load:
        """Return all work of an endpoint."""


class Meter:
    """See the module."""

    def __init__(self, ledger: Loads) -> None:
        self._ledger = ledger
        self.arrivals = Arrivals()
        self._hit = HitRate()
        #: Legs of each kind that a worker has answered, up to those after which it is warm.
        self._answered: dict[tuple[str, bool], int] = {}

    def arrived(self, ask: Ask) -> None:
        """Count a request as it comes; what it will find cached is the share that requests have found so far."""
        prompt = ask.prompt
        cached = min(prompt - 1, self._hit.share * prompt) if self._hit.tokens else 0
        self.arrivals.arrived(prompt, ask.output, ASSUMED.prefill(prompt - cached, cached))

    def prefilled(self, worker: Worker, work: Work, prompt: int, seconds: float, cached: int | None) -> None:
        """A prefill took ``seconds``, queueing included; the engine says that ``cached`` tokens were, if it says so."""
        predicted = work.seconds if cached is None else ASSUMED.prefill(max(1, prompt - cached), cached)
        # What waited would seem slow where other routers' work, which was in front of it, is not known.
        if self._warm(worker, prefill=True) and work.before < work.seconds:
            self.arrivals.prefilled(work.before + predicted, seconds)
        if cached is not None:
            self.arrivals.cached(prompt, cached)
            self._hit.learn(prompt, cached)

    def wrote(self, worker: Worker, tokens: int, seconds: float, ranks: int = 1) -> None:
        """A stream of ``tokens`` is complete, ``seconds`` apart on average (0: too few to tell).

        ``ranks`` is how many data-parallel ranks share the worker's requests.
        """
        self.arrivals.streamed(tokens)
        load = self._ledger.seen(worker.id)
        if self._warm(worker, prefill=False):
            # The stream itself is out of the books already; each rank steps for itself.
            predicted = ASSUMED.step(load.requests // ranks + 1, load.tokens // ranks)
            self.arrivals.stepped(predicted, seconds)

    def keep(self, known: Container[str]) -> None:
        """Forget workers that are gone."""
        self._answered = {key: count for key, count in self._answered.items() if key[0] in known}

    def _warm(self, worker: Worker, prefill: bool) -> bool:
        """Count an answered leg; return whether the worker had answered enough of them before."""
        before = self._answered.get((worker.id, prefill), 0)
        if before < COLD_LEGS:
            self._answered[worker.id, prefill] = before + 1
        return before >= COLD_LEGS
