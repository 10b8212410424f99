"""The engine: admits orders, batches them step by step, keeps KV blocks, hands KV over. Pure state machine.

The shell calls :meth:`Engine.begin`, waits for as long as the step takes, and calls :meth:`Engine.end`; everything else
may be called at any moment in between. Scheduling follows vLLM's: running sequences first, then waiting ones in order
of arrival while tokens, slots and blocks last; who came last is preempted when blocks run out, and computed anew.

Always true: the blocks held are those of unfinished sequences and of open leases, so all are free again when both are
gone; every order ends in exactly one ``Token`` with a reason or one ``Failed``, unless it is aborted by its id.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from twinpool.worker.engines.simulated.logic import counting, language
from twinpool.worker.engines.simulated.logic.blocks import BlockPool
from twinpool.worker.engines.simulated.logic.leases import Lease, Leases
from twinpool.worker.engines.simulated.logic.limits import Limits as Limits
from twinpool.worker.engines.simulated.logic.limits import Step
from twinpool.worker.engines.simulated.logic.metrics import Metrics
from twinpool.worker.engines.simulated.logic.sequence import (
    Discard,
    Event,
    Failed,
    Fetch,
    FinishReason,
    Handover,
    Order,
    Phase,
    Pull,
    Sequence,
    Token,
)
from twinpool.worker.engines.simulated.logic.tiers import NOTHING, Tiers

if TYPE_CHECKING:
    from twinpool.worker.engines.simulated.logic.drafting import Drafting
    from twinpool.worker.engines.simulated.logic.experts import Mixture
    from twinpool.worker.engines.simulated.logic.pace import Pace


class Engine:
    """See the module. ``now`` is any clock that never goes back, in seconds."""

    def __init__(
        self,
        limits: Limits,
        pace: Pace,
        drafting: Drafting | None = None,
        tiers: Tiers | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        self.limits = limits
        self.pace = pace
        self.drafting = drafting
        self.tiers = tiers or Tiers()
        self.mixture = mixture
        #: Steps so far, and lines that the engine would log.
        self.steps = 0
        self.log: list[str] = []
        labels = [self.tiers.label(tier) for tier in range(len(self.tiers))]
        self.metrics = Metrics(drafting.tokens if drafting else 0, labels)
        self.blocks = BlockPool(limits.kv_blocks)
        self.leases = Leases(limits.lease_seconds)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._pulling: dict[str, Sequence] = {}
        self._loading: dict[str, Sequence] = {}
        self._all: dict[str, Sequence] = {}
        self._batch: list[Sequence] = []

    @property
    def unfinished(self) -> int:
        """Number of orders that have not ended."""
        return len(self._all)

    def submit(self, order: Order, now: float) -> None:
        """Take an order whose prompt and answer fit into ``max_model_len`` and whose id is new."""
        sequence = Sequence(order, now, self.limits.block_size)
        self._all[order.id] = sequence
        self._waiting.append(sequence)

    def abort(self, order_id: str, reason: FinishReason = "abort") -> list[Event]:
        """End an order early; unknown ids are ignored. KV that was still to be pulled is discarded at its holder."""
        sequence = self._all.get(order_id)
        if sequence is None:
            return []
        remote = sequence.remote
        self._finish(sequence, reason)
        return [Discard(order_id, remote)] if remote is not None else []

    def begin(self, now: float) -> tuple[Step | None, list[Event]]:
        """Choose what the next step computes; None when there is nothing to compute now."""
        events: list[Event] = []
        budget = self._continue_running(self.limits.max_num_batched_tokens)
        self._admit_waiting(budget, now, events)
        self._gauge()
        if not self._batch:
            return None, events
        total = sum(sequence.scheduled for sequence in self._batch)
        seconds = self.pace.step((sequence.scheduled, sequence.computed) for sequence in self._batch)
        if self.drafting is not None:
            drafts = [(sequence.drafted, sequence.computed + 1) for sequence in self._batch if sequence.drafted]
            seconds += self.pace.drafts(drafts, self.drafting.share)
        if self.mixture is not None:
            seconds *= self.mixture.factor(self.steps)
            line = self.mixture.line(self.steps, total)
            self.log += [line] if line else []
        self.steps += 1
        return Step(seconds, total), events

    def end(self, now: float) -> list[Event]:
        """Finish the step that was begun: every sequence whose KV is complete gives its next token."""
        events: list[Event] = []
        batch, self._batch = self._batch, []
        total = 0
        for sequence in batch:
            if sequence.phase is Phase.RUNNING and sequence.scheduled:
                total += sequence.scheduled
                sequence.computed += sequence.scheduled
                sequence.scheduled = 0
                self._store(sequence)
                if not sequence.pending:
                    tokens = self._sampled(sequence, now)
                    total += len(tokens) - 1
                    events += tokens
        if batch:
            self.metrics.observe("iteration_tokens_total", total)
        self._gauge()
        return events

    def pulled(self, order_id: str, content: language.Content, seconds: float) -> None:
        """The KV of an order came, after ``seconds``; it decides the answer, right or wrong."""
        sequence = self._pulling.pop(order_id, None)
        if sequence is None:
            return
        missing = len(sequence.blocks) - sequence.cached // self.limits.block_size
        self.metrics.observe("nixl_xfer_time_seconds", seconds)
        self.metrics.observe("nixl_bytes_transferred", self.pace.transfer_bytes(missing, self.limits.block_size))
        self.metrics.observe("nixl_num_descriptors", self.pace.descriptors(missing))
        sequence.content = content
        sequence.remote = None
        # The last prompt token is computed once more: its logits give the first token.
        sequence.computed = len(sequence.tokens) - 1
        sequence.external = len(sequence.tokens) - sequence.cached
        sequence.phase = Phase.WAITING
        self._store(sequence, len(sequence.tokens))
        self._waiting.appendleft(sequence)

    def pull_failed(self, order_id: str, problem: str) -> list[Event]:
        """The KV of an order did not come: the order fails (vLLM's ``kv_load_failure_policy: fail``)."""
        sequence = self._pulling.get(order_id)
        if sequence is None:
            return []
        self.metrics.add("nixl_num_failed_transfers")
        self._finish(sequence, "error")
        return [Failed(order_id, "error", problem)]

    def loaded(self, order_id: str) -> None:
        """What slower tiers held of an order's prompt is on the accelerator."""
        sequence = self._loading.pop(order_id, None)
        if sequence is None:
            return
        load, sequence.load = sequence.load, NOTHING
        counting.loaded(self.metrics, self.tiers, load)
        sequence.computed += load.blocks * self.limits.block_size
        first = sequence.last_token is None
        sequence.external = load.blocks * self.limits.block_size if first else sequence.external
        sequence.phase = Phase.WAITING
        self._store(sequence)
        self._waiting.appendleft(sequence)

    def awaiting_pull(self) -> list[Sequence]:
        """Return the orders whose KV waits at its holder, whose leases the shell keeps alive."""
        return [sequence for sequence in self._all.values() if sequence.remote is not None]

    def release(self, request_id: str) -> bool:
        """A decode worker pulled the KV of a handoff, or does not want it; False when its lease was over."""
        lease = self.leases.close(request_id)
        if lease is None:
            self.metrics.add("nixl_num_notifications_after_expiry")
            return False
        self._free(lease)
        return True

    def expire(self, now: float) -> int:
        """Free the KV whose lease is over and return how many handoffs that were."""
        over = self.leases.expire(now)
        for lease in over:
            self._free(lease)
        self.metrics.add("nixl_num_kv_expired_reqs", len(over))
        return len(over)

    def _free(self, lease: Lease) -> None:
        self.blocks.drop(lease.blocks)
        self._gauge()

    # Scheduling

    def _needed(self, sequence: Sequence, tokens: int) -> int:
        """Return how many more blocks the sequence needs to hold the KV of its first ``tokens`` tokens."""
        return -(-tokens // self.limits.block_size) - len(sequence.blocks)

    def _continue_running(self, budget: int) -> int:
        for sequence in tuple(self._running):
            if sequence.phase is not Phase.RUNNING:
                continue  # preempted by one before it
            count = min(sequence.pending, budget)
            if count and self._grow(sequence, sequence.computed + count):
                self._schedule(sequence, count)
                budget -= count
                budget -= self._draft(sequence, budget)
        return budget

    def _draft(self, sequence: Sequence, budget: int) -> int:
        """Let a sequence that decodes check drafts too, as far as tokens and free blocks go; return how many."""
        sequence.drafted = 0
        if self.drafting is None or sequence.pending != 1:
            return 0
        room = self.limits.max_model_len - len(sequence.tokens)
        count = min(self.drafting.count(len(self._running)), budget, room)
        needed = self._needed(sequence, len(sequence.tokens) + count)
        if count < 1 or not self.blocks.fits((), needed):
            return 0
        sequence.blocks += self.blocks.take(needed)
        sequence.drafted = count
        return count

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        needed = self._needed(sequence, tokens)
        while not self.blocks.fits((), needed):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.blocks.take(needed)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.metrics.add("num_preemptions")
        self._running.remove(sequence)
        self.blocks.drop(sequence.blocks)
        sequence.restart()
        sequence.phase = Phase.WAITING
        self._waiting.appendleft(sequence)

    def _schedule(self, sequence: Sequence, count: int) -> None:
        sequence.scheduled = count
        self._batch.append(sequence)

    def _admit_waiting(self, budget: int, now: float, events: list[Event]) -> None:
        while self._waiting and budget and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            if not sequence.blocks and not self._place(sequence, budget, now):
                return
            self._waiting.popleft()
            if sequence.load.blocks:
                sequence.phase = Phase.LOADING
                self._loading[sequence.id] = sequence
                events.append(Fetch(sequence.id, sequence.load.seconds))
                continue
            if sequence.started is None:
                sequence.started = now
                self.metrics.observe("request_queue_time_seconds", now - sequence.arrived)
            if sequence.remote is not None:
                sequence.phase = Phase.PULLING
                self._pulling[sequence.id] = sequence
                missing = len(sequence.blocks) - sequence.cached // self.limits.block_size
                events.append(Pull(sequence.id, sequence.remote, missing))
                continue
            sequence.phase = Phase.RUNNING
            sequence.running_since = now if sequence.running_since is None else sequence.running_since
            self._running.append(sequence)
            count = min(sequence.pending, budget)
            self._schedule(sequence, count)
            budget -= count

    def _place(self, sequence: Sequence, budget: int, now: float) -> bool:
        """Give a sequence its first blocks, cached ones where there are; at least its last token is computed."""
        size, length = self.limits.block_size, len(sequence.tokens)
        full = sequence.hashes[: (length - 1) // size]
        cached = self.blocks.cached(full)
        hits, behind = len(cached) * size, full[len(cached) :]
        found = self.tiers.find(behind) if sequence.remote is None else []
        load = self.tiers.choose(length, hits, found, now)
        tokens = length if sequence.remote is not None else min(length, hits + load.blocks * size + budget)
        needed = -(-tokens // size) - len(cached)
        if not self.blocks.fits(cached, needed):
            return False
        self.blocks.hold(cached)
        sequence.blocks = cached + self.blocks.take(needed)
        sequence.computed, sequence.stored = hits, len(cached)
        sequence.load = load
        if sequence.remote is None:
            counting.looked_up(self.metrics, self.tiers, len(behind), found)
            self._offload(self.tiers.begin(load, behind[: load.blocks], now))
        if sequence.started is None:
            sequence.cached = hits
            counting.placed(self.metrics, sequence, self.tiers)
        return True

    def _offload(self, moved: tuple[list[int], list[int]]) -> None:
        new, gone = moved
        if new or gone:
            counting.stored(self.metrics, self.tiers, len(new))
            self.blocks.offloaded(new, gone)

    # Tokens

    def _store(self, sequence: Sequence, tokens: int | None = None) -> None:
        full = (sequence.computed if tokens is None else tokens) // self.limits.block_size
        if full > sequence.stored:
            start, size = sequence.stored, self.limits.block_size
            parent = sequence.hashes[start - 1] if start else None
            tokens_of = sequence.tokens[start * size : full * size]
            blocks, hashes = sequence.blocks[start:full], sequence.hashes[start:full]
            self.blocks.store(blocks, hashes, parent, tokens_of, sequence.order.salt, sequence.order.adapter)
            self._offload(self.tiers.store(hashes))
            sequence.stored = full

    def _sampled(self, sequence: Sequence, now: float) -> list[Token]:
        """Return the next token of a sequence, and those of its drafts that are right."""
        drafted, sequence.drafted = sequence.drafted, 0
        events = [self._sample(sequence, now)]
        if self.drafting is None or not drafted:
            return events
        right = self.drafting.right(sequence.content.state, drafted)
        self.metrics.count_draft(drafted, right)
        while len(events) <= right and sequence.phase is Phase.RUNNING:
            sequence.computed += 1
            self._store(sequence)
            events.append(self._sample(sequence, now, drafted=True))
        return events

    def _sample(self, sequence: Sequence, now: float, *, drafted: bool = False) -> Token:
        order = sequence.order
        index = sequence.generated
        token = sequence.content.next_token(may_end=not order.ignore_eos and index >= order.min_tokens)
        prompt_content = sequence.content if not index else None
        sequence.append(token)
        self._count_token(sequence, now, drafted=drafted)
        finish = self._finish_reason(sequence, token)
        handover = None
        if finish is not None:
            self.metrics.observe("e2e_request_latency_seconds", now - sequence.arrived)
            if order.hand_over and finish == "length":
                content = prompt_content or language.Content.of(order.prompt)
                handover = self._hand_over(sequence, content, now)
            self._finish(sequence, finish)
        cached = order.remote.cached if order.remote is not None else sequence.found
        return Token(order.id, token, index, cached, finish, handover)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        order = sequence.order
        if sequence.generated >= order.min_tokens and (
            token in order.stop_token_ids or (token == language.EOS and not order.ignore_eos)
        ):
            return "stop"
        full = len(sequence.tokens) >= self.limits.max_model_len
        return "length" if full or sequence.generated >= order.max_tokens else None

    def _count_token(self, sequence: Sequence, now: float, *, drafted: bool) -> None:
        self.metrics.add("generation_tokens")
        if drafted:
            return  # it comes with the one before it: vLLM sees one gap for each step
        if sequence.last_token is not None:
            self.metrics.observe("inter_token_latency_seconds", now - sequence.last_token)
        else:
            counting.first_token(self.metrics, sequence, now)
        sequence.last_token = now

    def _hand_over(self, sequence: Sequence, content: language.Content, now: float) -> Handover:
        """Keep the prompt's blocks under a lease; what belongs to the answer alone is freed with the sequence."""
        prompt = len(sequence.order.prompt)
        count = -(-prompt // self.limits.block_size)
        kept, sequence.blocks = tuple(sequence.blocks[:count]), sequence.blocks[count:]
        self.leases.open(sequence.id, kept, content, prompt, now)
        return Handover(sequence.id, kept, prompt, sequence.found)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.phase = Phase.FINISHED
        del self._all[sequence.id]
        self._pulling.pop(sequence.id, None)
        self._loading.pop(sequence.id, None)
        if sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        self.blocks.drop(sequence.blocks)
        sequence.blocks = []
        self.metrics.add("request_success", 1, reason)
        self._gauge()

    def _gauge(self) -> None:
        self.metrics.set("num_requests_running", len(self._running))
        self.metrics.set("num_requests_waiting", len(self._waiting) + len(self._pulling) + len(self._loading))
        self.metrics.set("kv_cache_usage_perc", 1 - self.blocks.free / self.limits.kv_blocks)
