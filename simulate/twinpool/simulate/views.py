"""What routers believe about workers' caches: the router's own KV indices, fed by simulated workers.

Three kinds. ``exact``: every event at once. ``late``: events come seconds late, and some never. ``approximate``: no
events; learnt from where prompts went, and discounted by the cached tokens that workers report. With events too, what
was just sent somewhere counts as held there for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from twinpool.router.logic.index_approximate import ApproximateIndex
from twinpool.router.logic.index_events import REMOVED, STORED, Event
from twinpool.router.logic.index_exact import ExactIndex, Holder
from twinpool.simulate.traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from twinpool.simulate.clock import Clock

Kind = Literal["exact", "late", "approximate"]

#: Seconds by which late events are late, and the share of them that never comes. No replay repairs these.
LAG = 5.0
LOST = 0.1

#: Entries of the simulated index: more than all workers of a pool hold.
_CAPACITY = 2**17


class View:
    """The index of one pool; workers by name."""

    def __init__(self, kind: Kind, clock: Clock, rng: Random) -> None:
        self._kind = kind
        self._clock = clock
        self._rng = rng
        self._exact = ExactIndex(_CAPACITY)
        self._approximate = ApproximateIndex(_CAPACITY)

    def listener(self, worker: str) -> Callable[[list[int], bool], None] | None:
        """Return what the cache of ``worker`` tells of its blocks, or None when nothing listens."""
        if self._kind == "approximate":
            return None
        holder = Holder(worker)

        def apply(blocks: list[int], came: bool) -> None:
            # Block 0 is a block of a trace; 0 is no key.
            self._exact.apply(holder, (Event(STORED if came else REMOVED, [block + 1 for block in blocks], "GPU"),))

        def later(blocks: list[int], came: bool) -> None:
            heard = [block for block in blocks if self._rng.random() >= LOST]
            self._clock.at(self._clock.now + LAG, lambda: apply(heard, came))

        return later if self._kind == "late" else apply

    def sent(self, worker: str, blocks: Sequence[int], wait: float = 0.0) -> None:
        """A prompt went to ``worker``, where it is expected to be read in ``wait`` seconds."""
        keys = [block + 1 for block in blocks]
        if self._kind == "approximate":
            self._approximate.learn(keys, worker)
        else:
            self._exact.expect(Holder(worker), keys, self._clock.now, wait)

    def reported(self, worker: str, foretold: int, cached: int) -> None:
        """The worker said how many prompt tokens it had."""
        if self._kind == "approximate":
            self._approximate.report(worker, foretold, cached)

    def cached(self, blocks: Sequence[int], workers: Sequence[str]) -> dict[str, int]:
        """Return the prompt tokens that each worker is believed to hold."""
        keys = [block + 1 for block in blocks]
        if self._kind == "approximate":
            found = self._approximate.leading(keys, workers)
            return {worker: int(depth * BLOCK_TOKENS) for worker, depth in found.items()}
        self._exact.expire(self._clock.now)
        by_holder = self._exact.leading(keys).items()
        return {holder.endpoint: max(held.device, held.expected) * BLOCK_TOKENS for holder, held in by_holder}
