"""What workers probably hold, learnt from where requests went: the KV index that needs nothing from the engines.

It knows neither what engines evicted nor what others sent them, so it is always called approximate, and each worker's
answers are discounted by how many of the foretold tokens it really had (``usage.prompt_tokens_details.cached_tokens``).
Always true: a worker that is gone, or restarted (another id), holds nothing; memory is that of the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.router.logic.index_table import BlockTable, runs

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

#: Share of the distance to the last report that trust goes.
_WEIGHT = 0.1
#: Trust never ends altogether, or it could not be won back.
_LEAST = 0.05


@dataclass(frozen=True, slots=True)
class Trust:
    """Which share of the tokens foretold for a worker it really had."""

    share: float = 1.0
    reports: int = 0


_FULL = Trust()


def judged(trust: Trust, foretold: int, reported: int) -> Trust:
    """Return the trust after a request of which ``foretold`` prompt tokens were thought cached; 0 say nothing."""
    if foretold <= 0:
        return trust
    seen = max(0.0, min(1.0, reported / foretold))
    share = trust.share + _WEIGHT * (seen - trust.share)
    return Trust(max(_LEAST, share), trust.reports + 1)


class ApproximateIndex:
    """Blocks by worker id."""

    def __init__(self, capacity: int) -> None:
        self.table = BlockTable(capacity)
        self._bits: dict[str, int] = {}
        self._free: list[int] = []
        self.trust: dict[str, Trust] = {}

    def keep(self, workers: Container[str]) -> None:
        """Forget the workers that are not among ``workers``."""
        gone = [worker for worker in self._bits if worker not in workers]
        if gone:
            self.table.forget(sum(1 << self._bits[worker] for worker in gone))
        for worker in gone:
            self._free.append(self._bits.pop(worker))
            self.trust.pop(worker, None)

    def forget(self, worker: str) -> None:
        """A worker has lost all that it held."""
        if worker in self._bits:
            self.table.forget(1 << self._bits[worker])

    def learn(self, keys: Iterable[int], worker: str) -> None:
        """A prompt with these blocks went to ``worker``."""
        bit = self._bits.get(worker)
        if bit is None:
            bit = self._bits[worker] = self._free.pop() if self._free else len(self._bits)
        for key in keys:
            self.table.add(key, 1 << bit)

    def report(self, worker: str, foretold: int, reported: int) -> None:
        """The engine said how many prompt tokens it had cached."""
        if worker in self._bits:
            self.trust[worker] = judged(self.trust.get(worker, _FULL), foretold, reported)

    def leading(self, keys: Sequence[int], workers: Iterable[str]) -> dict[str, float]:
        """Return how many of the blocks each worker holds from the first on, discounted by trust; 0 is left out."""
        held = runs(self.table.masks(keys))
        found: dict[str, float] = {}
        if held:
            for worker in workers:
                bit = self._bits.get(worker)
                depth = 0 if bit is None else next((depth for bits, depth in held if bits >> bit & 1), 0)
                if depth:
                    found[worker] = depth * self.trust.get(worker, _FULL).share
        return found
