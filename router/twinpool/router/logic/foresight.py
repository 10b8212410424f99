"""How well times are foretold, and what is learnt from it: the model of prices follows the hardware it runs on.

Three things are learnt, each a factor between the model's time and the observed one, moved by bounded steps so that no
stall, cold start or wrong clock carries it away (:mod:`twinpool.core.correction`): of prefills, of what a handoff takes
until the first token, and of single workers beside the others (a GPU that is throttled, a node with a slow disk).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from twinpool.core.correction import Correction
from twinpool.core.economics import ASSUMED

if TYPE_CHECKING:
    from collections.abc import Container

    from twinpool.core.economics import Prices

#: Prefills of a worker before it is told from others, and how far at most: what is farther off is a fault, and the
#: breaker's business.
_SAMPLES: Final = 16
_LEAST, _MOST = 0.25, 4.0
#: Samples from which on first tokens of one worker teach at most once in so many seconds.
_YOUNG: Final = 64
_MOMENT: Final = 0.002
#: Prices are told apart by factors in steps of 1/128 of the logarithm (0.8 %): the same few come again and again, where
#: making them anew for each request cost more than the choice.
_STEPS: Final = 128


@lru_cache(maxsize=1024)
def _prices(prefill: int, handoff: int) -> Prices:
    """Return the model's prices, corrected by factors that are given in steps."""
    factor = math.exp(handoff / _STEPS)
    return replace(
        ASSUMED.scaled(math.exp(prefill / _STEPS)),
        pull_setup=ASSUMED.pull_setup * factor,
        pull_token=ASSUMED.pull_token * factor,
    )


@dataclass(slots=True)
class Foresight:
    """What has been learnt; ``workers`` are beside the mean of all."""

    prefill: Correction = field(default_factory=Correction)
    handoff: Correction = field(default_factory=Correction)
    workers: dict[str, Correction] = field(default_factory=dict)
    #: The model's prices, corrected.
    prices: Prices = ASSUMED
    #: Of workers that are told from others, how many times as long as others they take.
    _paces: dict[str, float] = field(default_factory=dict)
    #: When workers may teach something again.
    _next: dict[str, float] = field(default_factory=dict)

    def enough(self, worker: str, now: float) -> bool:
        """Whether what a first token of ``worker`` teaches was learnt a moment ago; else the moment begins now.

        A busy worker would teach more often than anything changes, and learning costs as much as a choice.
        """
        if now < self._next.get(worker, now):
            return True
        if self.prefill.samples + self.handoff.samples >= _YOUNG:
            self._next[worker] = now + _MOMENT
        return False

    def pace(self, worker: str) -> float:
        """Return how many times as long as others a worker takes; 1 until enough is known of it."""
        return self._paces.get(worker, 1.0)

    def prefilled(self, worker: str, predicted: float, observed: float, *, typical: bool = True) -> None:
        """A prefill that the bare model foretold to take ``predicted`` seconds, queueing included, took ``observed``.

        One that is not ``typical``, such as on a worker that writes answers meanwhile, says nothing of others.
        """
        known = self.workers.get(worker)
        if known is None:
            known = self.workers[worker] = Correction()
        known.learn(predicted * self.prefill.factor, observed)
        if known.samples >= _SAMPLES:
            self._paces[worker] = max(_LEAST, min(_MOST, known.factor))
        if typical:
            self.prefill.learn(predicted, observed)
            self._price()

    def handed_over(self, pull: float, observed: float) -> None:
        """The first token came ``observed`` seconds after a handoff whose bare pull was foretold to take ``pull``."""
        self.handoff.learn(pull, observed)
        self._price()

    def keep(self, known: Container[str]) -> None:
        """Forget workers that are gone."""
        self.workers = {worker: learnt for worker, learnt in self.workers.items() if worker in known}
        self._paces = {worker: pace for worker, pace in self._paces.items() if worker in known}
        self._next = {worker: moment for worker, moment in self._next.items() if worker in known}

    def state(self) -> dict[str, tuple[float, int]]:
        """Return factor and number of samples of all that is learnt: prefill, handoff, and workers by their id."""
        every = {"prefill": self.prefill, "handoff": self.handoff, **self.workers}
        return {name: (learnt.factor, learnt.samples) for name, learnt in every.items()}

    def _price(self) -> None:
        self.prices = _prices(round(self.prefill.log_factor * _STEPS), round(self.handoff.log_factor * _STEPS))
