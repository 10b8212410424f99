"""What routers believe about workers' caches: the router's own KV indices, fed by simulated workers.

Three kinds. ``exact``: every event at once. ``late``: events come seconds late, and some never. ``approximate``: no
events; learnt from where prompts went, and discounted by the cached tokens that workers report. With events too, what
was just sent somewhere counts as held there for a while, and a worker that reports other cached tokens than its events
foretold is estimated as if it had none, as the router does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from twinpool.router.logic.index_approximate import ApproximateIndex
from twinpool.router.logic.index_events import REMOVED, STORED, Event
from twinpool.router.logic.index_exact import ExactIndex, Held
from twinpool.router.logic.index_view import ExactView
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
_NONE = Held(0, 0)


class Events:
    """The index of one pool that follows its workers' events; all routers see the same."""

    def __init__(self, kind: Kind, clock: Clock, rng: Random) -> None:
        self.kind = kind
        self.clock = clock
        self.index = ExactIndex(_CAPACITY)
        self._rng = rng

    def listener(self, worker: str, medium: str = "GPU") -> Callable[[list[int], bool], None] | None:
        """Return what a cache of ``worker`` tells of its blocks, or None when nothing listens."""
        if self.kind == "approximate":
            return None

        def apply(blocks: list[int], came: bool) -> None:
            # Block 0 is a block of a trace; 0 is no key.
            self.index.apply(worker, (Event(STORED if came else REMOVED, [block + 1 for block in blocks], medium),))

        def later(blocks: list[int], came: bool) -> None:
            heard = [block for block in blocks if self._rng.random() >= LOST]
            self.clock.at(self.clock.now + LAG, lambda: apply(heard, came))

        return later if self.kind == "late" else apply


class View:
    """What one router believes; workers by name."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._approximate = ApproximateIndex(_CAPACITY)
        self._agreement = ExactView()
        self._agreement.rely(BLOCK_TOKENS, ())

    def sent(self, worker: str, blocks: Sequence[int], wait: float = 0.0) -> int | None:
        """A prompt went to ``worker``, where it is expected to be read in ``wait`` seconds.

        Return the tokens that it has there by events alone; None when they do not say.
        """
        keys = [block + 1 for block in blocks]
        self._approximate.learn(keys, worker)
        if self._events.kind == "approximate":
            return None
        held = self._events.index.leading(keys).get(worker, _NONE)
        self._events.index.expect(worker, keys, self._events.clock.now, wait)
        # What a tier has may be loaded or not.
        return held.device * BLOCK_TOKENS if max(held.expected, held.anywhere) <= held.device else None

    def reported(self, worker: str, foretold: int, sure: int | None, cached: int) -> None:
        """The worker said how many prompt tokens it had; ``sure`` is what :meth:`sent` returned."""
        self._approximate.report(worker, foretold, cached)
        if sure is not None:
            self._agreement.judge(worker, sure, cached)

    def cached(self, blocks: Sequence[int], workers: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return the prompt tokens that each worker is believed to hold: on the accelerator, and anywhere."""
        keys = [block + 1 for block in blocks]
        if self._events.kind == "approximate":
            return self._estimated(keys, workers)
        self._events.index.expire(self._events.clock.now)
        by_holder = self._events.index.leading(keys).items()
        told = {holder: _tokens(max(held.device, held.expected), held.anywhere) for holder, held in by_holder}
        doubtful = [worker for worker in workers if not self._agreement.trusted(worker)]
        if doubtful:
            for worker in doubtful:
                told.pop(worker, None)
            told.update(self._estimated(keys, doubtful))
        return told

    def _estimated(self, keys: Sequence[int], workers: Sequence[str]) -> dict[str, tuple[int, int]]:
        return {w: _tokens(depth, 0) for w, depth in self._approximate.leading(keys, workers).items()}


def _tokens(device: float, anywhere: int) -> tuple[int, int]:
    tokens = int(device * BLOCK_TOKENS)
    return tokens, max(tokens, anywhere * BLOCK_TOKENS)
