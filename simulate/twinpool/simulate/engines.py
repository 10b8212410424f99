"""Simulated prefill and decode workers: queues, batches, KV room and links. Times from :mod:`twinpool.core.economics`.

A prefill worker computes one prompt after the other. A decode worker steps all that it runs at once; between two events
its batch does not change, so the steps in between are taken in one go (their time is that of the batch as it stands,
which errs by less than the growth of the context in between). Prompts given whole to a decode worker are computed in
chunks beside its batch, and hold it up. Always true: KV reserved never exceeds the capacity.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.core.tiers import plan
from twinpool.simulate.tiers import runs
from twinpool.simulate.traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twinpool.core.economics import Prices
    from twinpool.simulate.cache import Cache
    from twinpool.simulate.clock import Clock
    from twinpool.simulate.drafting import Drafting
    from twinpool.simulate.tiers import Tier
    from twinpool.simulate.traces import Request

#: Prompt tokens that a decode worker computes in one step beside its batch.
_CHUNK = 2048


def _nothing() -> None:
    """Do nothing."""


@dataclass(slots=True)
class Job:
    """A request on its way, and when what happened to it."""

    request: Request
    #: Prompt tokens that were really cached where it was prefilled.
    hit: int = 0
    first: float = float("inf")
    finish: float = float("inf")
    #: What is to be done when its prefill is over, and at its end.
    prefilled: Callable[[], None] = _nothing
    finished: Callable[[], None] = _nothing
    #: Ask anew, because a worker was lost before the first token.
    again: Callable[[], None] = _nothing


@dataclass(slots=True)
class Link:
    """One worker's way to the network, and when what it carries will have gone through."""

    free: float = 0.0


class PrefillWorker:
    """Computes prompts first come, first served; its link hands KV over in the same way."""

    def __init__(self, clock: Clock, prices: Prices, cache: Cache, tiers: Sequence[Tier] = ()) -> None:
        self._clock = clock
        self._prices = prices
        self.cache = cache
        self._tiers = tiers
        self._queue: deque[Job] = deque()
        self._busy = False
        self._link = Link()
        #: Prompts that it has computed and whose KV nobody has pulled yet.
        self.held = 0
        self._lost = False
        #: Seconds of computing done.
        self.worked = 0.0

    @property
    def busy(self) -> bool:
        """Return whether anybody needs it still."""
        return self._busy or self.held > 0

    def lose(self) -> None:
        """End it with what it holds: what it has not computed yet is asked anew."""
        self._lost = True
        waiting, self._queue = self._queue, deque()
        for job in waiting:
            job.again()

    def submit(self, job: Job) -> None:
        """Take a prompt."""
        self._queue.append(job)
        if not self._busy:
            self._start()

    def _start(self) -> None:
        job = self._queue.popleft()
        self._busy = True
        request = job.request
        device = self.cache.leading(request.blocks)
        job.hit = min(device * BLOCK_TOKENS, request.prompt - 1)
        seconds = self._prices.prefill(request.prompt - job.hit, job.hit)
        if self._tiers:
            found = plan(self._prices, request.prompt, job.hit, runs(self._tiers, request.blocks, device))
            job.hit += found.tokens
            seconds = found.seconds
        self.worked += seconds
        self._clock.at(self._clock.now + seconds, lambda: self._end(job))

    def _end(self, job: Job) -> None:
        if self._lost:
            job.again()
            return
        for cache in (self.cache, *(tier.cache for tier in self._tiers)):
            cache.use(job.request.blocks)
        self._busy = False
        self.held += 1
        if self._queue:
            self._start()
        job.prefilled()

    def let_go(self) -> None:
        """Nobody will pull a prompt that it has computed."""
        self.held -= 1

    def hand_over(
        self, tokens: int, done: Callable[[], None], failed: Callable[[], None], sink: Link | None = None
    ) -> None:
        """Send the KV of ``tokens`` tokens over the link, after what it and the link of the ``sink`` carry already.

        ``failed`` is called in place of ``done`` when it was lost meanwhile.
        """
        links = (self._link,) if sink is None else (self._link, sink)
        free = max(self._clock.now, *(link.free for link in links)) + self._prices.pull(tokens)
        for link in links:
            link.free = free

        def over() -> None:
            self.held -= 1
            (failed if self._lost else done)()

        self._clock.at(free, over)


class DecodeWorker:
    """Writes tokens for a batch, one each step."""

    def __init__(
        self,
        clock: Clock,
        prices: Prices,
        capacity: int,
        cache: Cache,
        link: Link | None = None,
        sequences: int | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self._clock = clock
        self._prices = prices
        #: Its way to the network; None: pulls wait at the sender alone.
        self._link = link
        self.capacity = capacity
        #: How many requests it runs at once (``max_num_seqs``); None: as many as there is room for.
        self._sequences = sequences
        self._drafting = drafting
        self._admitted = 0
        self.cache = cache
        #: KV tokens of what it runs, answers included.
        self.reserved = 0
        self._waiting: deque[tuple[Job, PrefillWorker | None]] = deque()
        #: What it runs, by the step at which it ends.
        self._running: list[tuple[float, int, Job]] = []
        self._number = 0
        self._context = 0.0
        self._steps = 0.0
        self._since = 0.0
        #: Prompts that it computes itself, and the tokens done of the first one.
        self._whole: deque[Job] = deque()
        self._done = 0.0
        self._version = 0
        self._lost = False

    @property
    def busy(self) -> bool:
        """Return whether anybody needs it still."""
        return self.reserved > 0 or bool(self._waiting)

    def lose(self) -> None:
        """End it: who has a first token gets no more, all others are asked anew."""
        self._lost = True
        self._version += 1
        waiting, self._waiting = self._waiting, deque()
        for job, source in waiting:
            if source is not None:
                source.let_go()
            job.again()
        for job in self._whole:
            job.again()
        for _, _, job in self._running:
            job.finished()
            job.prefilled = job.finished = job.again = _nothing

    def submit(self, job: Job, source: PrefillWorker | None) -> None:
        """Take a request whose KV is at ``source``, or a whole one; one that never fits is refused silently at once."""
        request = job.request
        if request.prompt + request.output > self.capacity:
            if source is not None:
                source.let_go()
            job.finished()
            return
        self._waiting.append((job, source))
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            job, source = self._waiting[0]
            size = job.request.prompt + job.request.output
            if self.reserved + size > self.capacity or self._admitted == self._sequences:
                return
            self._waiting.popleft()
            self.reserved += size
            self._admitted += 1
            if source is None:
                self._advance()
                # What is written for has a step under way, which a prompt that comes meanwhile is no part of.
                left = (1.0 - self._steps % 1.0) * self._step() if self._running and not self._whole else 0.0
                self._clock.at(self._clock.now + left, lambda job=job: self._read(job))  # type: ignore[misc]
            else:
                held = self.cache.leading(job.request.blocks) * BLOCK_TOKENS
                source.hand_over(
                    max(0, job.request.prompt - held),
                    lambda job=job: self._join(job),  # type: ignore[misc]
                    lambda job=job: self._pull_failed(job),  # type: ignore[misc]
                    self._link,
                )

    def _pull_failed(self, job: Job) -> None:
        """The prefill worker was lost before its KV was here."""
        self.reserved -= job.request.prompt + job.request.output
        self._admitted -= 1
        job.finished()
        job.again()
        self._admit()

    def _read(self, job: Job) -> None:
        """Compute a whole prompt, after those that it computes already."""
        if self._lost:
            job.again()
            return
        self._advance()
        self._whole.append(job)
        if len(self._whole) == 1:
            self._begin_whole()
        self._plan()

    def _join(self, job: Job) -> None:
        """Write the first token in the next step."""
        if self._lost:
            job.again()
            return
        self._advance()
        self._number += 1
        heapq.heappush(self._running, (self._steps + job.request.output, self._number, job))
        self._context += job.request.prompt
        self.cache.use(job.request.blocks)
        job.first = self._clock.now + self._step()
        self._plan()

    def _step(self) -> float:
        """Return the time of one step as things stand."""
        if not self._whole:
            if self._drafting is not None:
                return self._drafting.token(self._prices, len(self._running), self._context)
            return self._prices.step(len(self._running), self._context)
        left = self._whole[0].request.prompt - self._done
        return self._prices.mixed(min(_CHUNK, left), self._done, len(self._running), self._context)

    def _advance(self) -> None:
        """Take the steps since the last event."""
        now = self._clock.now
        if now > self._since and (self._running or self._whole):
            steps = (now - self._since) / self._step()
            self._steps += steps
            self._context += steps * len(self._running)
            if self._whole:
                left = self._whole[0].request.prompt - self._done
                self._done += min(left, steps * min(_CHUNK, left))
        self._since = now

    def _plan(self) -> None:
        """Wait for the next end of a chunk or of an answer; what was planned before does not happen."""
        self._version += 1
        version = self._version
        steps = []
        if self._running:
            steps.append(self._running[0][0] - self._steps)
        if self._whole:
            # One chunk: its step's time depends on how much stands before it.
            steps.append(1.0)
        if steps:
            moment = self._clock.now + max(0.0, min(steps)) * self._step()
            self._clock.at(moment, lambda: self._event(version))

    def _event(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        if self._whole and self._done >= self._whole[0].request.prompt - 0.5:
            self._end_whole()
        while self._running and self._running[0][0] <= self._steps + 1e-6:
            _, _, job = heapq.heappop(self._running)
            request = job.request
            self._context = max(0.0, self._context - request.prompt - request.output) if self._running else 0.0
            self.reserved -= request.prompt + request.output
            self._admitted -= 1
            job.finish = self._clock.now
            job.finished()
            # What a router keeps for a request goes with it: a trace may have a million.
            job.prefilled = job.finished = job.again = _nothing
        self._admit()
        self._plan()

    def _end_whole(self) -> None:
        """The first prompt that it computes itself is done, with its first token; the next one may find it cached."""
        job = self._whole.popleft()
        self._done = 0.0
        job.prefilled()
        self._join(job)
        job.first = self._clock.now
        if self._whole:
            self._begin_whole()

    def _begin_whole(self) -> None:
        job = self._whole[0]
        job.hit = min(self.cache.leading(job.request.blocks) * BLOCK_TOKENS, job.request.prompt - 1)
        self._done = job.hit
