"""How well times are foretold, and what is learnt from it: the model of prices follows the hardware it runs on.

Three things are learnt, each a factor between the model's time and the observed one, moved by bounded steps so that no
stall, cold start or wrong clock carries it away (:mod:`twinpool.core.correction`): of prefills, of what a handoff takes
until the first token, and of single workers beside the others (a GPU that is throttled, a node with a slow disk).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from twinpool.core.correction import Correction, learn
from twinpool.core.economics import ASSUMED

if TYPE_CHECKING:
    from collections.abc import Container

    from twinpool.core.economics import Prices

#: Prefills of a worker before it is told from others, and how far at most: what is farther off is a fault, and the
#: breaker's business.
_SAMPLES: Final = 16
_LEAST, _MOST = 0.25, 4.0


@dataclass(slots=True)
class Foresight:
    """What has been learnt; ``workers`` are beside the mean of all."""

    prefill: Correction = field(default_factory=Correction)
    handoff: Correction = field(default_factory=Correction)
    workers: dict[str, Correction] = field(default_factory=dict)
    #: The model's prices, corrected.
    prices: Prices = ASSUMED

    def pace(self, worker: str) -> float:
        """Return how many times as long as others a worker takes; 1 until enough is known of it."""
        known = self.workers.get(worker)
        if known is None or known.samples < _SAMPLES:
            return 1.0
        return max(_LEAST, min(_MOST, known.factor))

    def prefilled(self, worker: str, predicted: float, observed: float, *, typical: bool = True) -> None:
        """A prefill that the bare model foretold to take ``predicted`` seconds, queueing included, took ``observed``.

        One that is not ``typical``, such as on a worker that writes answers meanwhile, says nothing of others.
        """
        known = self.workers.get(worker, Correction())
        self.workers[worker] = learn(known, predicted * self.prefill.factor, observed)
        if typical:
            self.prefill = learn(self.prefill, predicted, observed)
        self._price()

    def handed_over(self, pull: float, observed: float) -> None:
        """The first token came ``observed`` seconds after a handoff whose bare pull was foretold to take ``pull``."""
        self.handoff = learn(self.handoff, pull, observed)
        self._price()

    def keep(self, known: Container[str]) -> None:
        """Forget workers that are gone."""
        self.workers = {worker: learnt for worker, learnt in self.workers.items() if worker in known}

    def state(self) -> dict[str, tuple[float, int]]:
        """Return factor and number of samples of all that is learnt: prefill, handoff, and workers by their id."""
        every = {"prefill": self.prefill, "handoff": self.handoff, **self.workers}
        return {name: (learnt.factor, learnt.samples) for name, learnt in every.items()}

    def _price(self) -> None:
        factor = self.handoff.factor
        self.prices = replace(
            ASSUMED.scaled(self.prefill.factor),
            pull_setup=ASSUMED.pull_setup * factor,
            pull_token=ASSUMED.pull_token * factor,
        )
