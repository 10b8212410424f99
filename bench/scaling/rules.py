"""Rules that are published, written anew with one knob each, and ours. None knows what will come."""

from __future__ import annotations

import math
from collections import deque
from random import Random
from typing import TYPE_CHECKING

from bench.scaling.pool import BATCH, ITL, PRICES, TTFT, Rule, work_of
from twinpool.core.spec import InferencePool
from twinpool.operator.logic.scaling_report import Totals, Work
from twinpool.operator.logic.scaling_step import Seen, State, advance
from twinpool.operator.logic.scaling_window import Look, remembered, window
from twinpool.operator.logic.target import limits
from twinpool.router.logic import price
from twinpool.router.logic.places import CROWDED, PREFILL_SHARE
from twinpool.router.logic.policy import Ask, Candidate

if TYPE_CHECKING:
    from bench.scaling.pool import Pool
    from bench.scaling.workloads import Arrival, Workload

MOST = 16
#: Seconds between two decisions of the rules of others, and for which they hold the highest wish before scaling in
#: (Kubernetes' HPA: 15 and 300). Ours holds as long.
_EVERY, _HOLD = 15, 300


def bounded(pair: tuple[float, float], workload: Workload) -> tuple[int, int]:
    """Return whole numbers within 1 and the most; where the budget is less, both in proportion."""
    prefill, decode = (max(1, min(MOST, math.ceil(count - 1e-9))) for count in pair)
    budget = workload.budget
    if budget is not None and prefill + decode > budget:
        prefill = max(1, min(budget - 1, budget * prefill // (prefill + decode)))
        decode = budget - prefill
    return prefill, decode


class Static(Rule):
    """The same numbers all the time."""

    def __init__(self, pair: tuple[int, int]) -> None:
        self._pair = pair

    def decide(self, _: Pool) -> tuple[int, int]:
        """See :class:`bench.scaling.pool.Rule`."""
        return self._pair


class Utilisation(Rule):
    """HPA: ceil(now x use / target), 10 % tolerance, the highest wish of the last 300 s. ``ratio``: prefill for each
    decode group, fixed (kthena's and HeteroScale's band); None: each role by its own use."""

    def __init__(self, target: float, ratio: float | None = None) -> None:
        self._target, self._ratio = target, ratio
        self._busy = 0.0
        self._wishes: deque[tuple[float, tuple[int, int]]] = deque()

    def decide(self, pool: Pool) -> tuple[int, int]:
        """See :class:`bench.scaling.pool.Rule`."""
        if pool.now % _EVERY:
            return pool.wanted
        use = (pool.busy - self._busy) / _EVERY / max(1, pool.wanted[0])
        self._busy = pool.busy
        load = (len(pool.running) + len(pool.entering)) / (max(1, pool.wanted[1]) * BATCH)
        prefill, decode = self._wish(pool.wanted[0], min(1.0, use)), self._wish(pool.wanted[1], min(1.0, load))
        if self._ratio is not None:
            prefill = math.ceil(decode * self._ratio)
        return held(self._wishes, pool, bounded((prefill, decode), pool.workload))

    def _wish(self, now: int, use: float) -> float:
        return now if abs(use / self._target - 1) <= 0.1 else math.ceil(now * use / self._target)


def held(wishes: deque[tuple[float, tuple[int, int]]], pool: Pool, wish: tuple[int, int]) -> tuple[int, int]:
    """Return the numbers with the highest wish of the last 300 s where the newest is less."""
    wishes.append((pool.now, wish))
    while wishes[0][0] < pool.now - _HOLD:
        wishes.popleft()
    most = [max(old[role] for _, old in wishes) for role in (0, 1)]
    held = [max(new, min(now, high)) for new, now, high in zip(wish, pool.wanted, most, strict=True)]
    return bounded((held[0], held[1]), pool.workload)


class Concurrency(Rule):
    """KPA: requests at a stage / target, over 60 s, or over 6 s when that asks for twice of what there is."""

    def __init__(self, target: float) -> None:
        self._target = target
        self._seen: deque[tuple[int, int]] = deque(maxlen=60)
        self._wishes: deque[tuple[float, tuple[int, int]]] = deque()

    def decide(self, pool: Pool) -> tuple[int, int]:
        """See :class:`bench.scaling.pool.Rule`."""
        self._seen.append((len(pool.queue) + len(pool.sent), len(pool.running) + len(pool.entering)))
        if pool.now % 2:
            return pool.wanted
        wish = [self._wish(role, pool.wanted[role], each) for role, each in ((0, 1.0), (1, float(BATCH)))]
        return held(self._wishes, pool, bounded((wish[0], wish[1]), pool.workload))

    def _wish(self, role: int, now: int, each: float) -> float:
        values = [entry[role] for entry in self._seen]
        stable, panic = (sum(part) / len(part) / (self._target * each) for part in (values, values[-6:]))
        return max(panic, now) if panic >= 2 * now else stable


class Ours(Rule):
    """The decision of the operator, from reports as routers would give them.

    ``convertible``: decode groups prefill what would wait, as routers have them do unless ``handoff.conditional`` says
    otherwise. ``lending``: prefill groups with time do all of what decode groups have no place for; no router has them
    do so.
    """

    def __init__(self, workload: Workload, *, convertible: bool = True, lending: bool = False) -> None:
        self._convertible = convertible
        self._lending = lending
        self._rng = Random(0)
        role = {"min": 1, "max": MOST}
        scaling = {"prefill": role, "decode": role, "stabilization": {"scaleIn": f"{_HOLD}s"}}
        if workload.budget is not None:
            scaling["gpuBudget"] = workload.budget
        spec = {
            "model": {"name": "m"}, "prefill": {}, "decode": {}, "scaling": scaling,
            "engine": {"args": [f"--max-num-seqs={BATCH}"]},
            "objectives": {"ttft": f"{round(1000 * TTFT)}ms", "itl": f"{round(1000 * ITL)}ms"},
        }  # fmt: skip
        self._pool = InferencePool.model_validate({"metadata": {"name": "p"}, "spec": spec})
        self._state, self._totals = State(), Totals()
        self._looks: tuple[Look, ...] = ()
        self._ended = 0

    def decide(self, pool: Pool) -> tuple[int, int]:
        """See :class:`bench.scaling.pool.Rule`."""
        self._count(pool)
        if pool.now % 2:
            return pool.wanted
        work = Work(self._totals, 0, pool.backlog(), len(pool.running) + len(pool.entering) + len(pool.lent))
        self._looks = remembered(self._looks, Look(pool.now, {"r": work}), 60.0)
        scaling = self._pool.spec.scaling
        assert scaling is not None
        serving = pool.serving(), pool.ready()
        work_seen = window(self._looks, ["r"], pool.now, 60.0)
        seen = Seen(pool.wanted, pool.wanted, work_seen, pool.workload.start, serving)
        self._state, outcome = advance(self._state, self._pool, scaling, seen, pool.now)
        assert limits(self._pool, scaling).prefill[0] <= outcome.pair[0]
        return outcome.pair

    def ahead(self, pool: Pool) -> float:
        """See :class:`bench.scaling.pool.Rule`."""
        return TTFT * PREFILL_SHARE[self._convertible and not self._crowded(pool)]

    @staticmethod
    def _crowded(pool: Pool) -> bool:
        """Return whether hardly a place is left at decode groups, which then compute no prompts."""
        return pool.admitted > CROWDED * pool.ready() * BATCH

    def decodes(self, pool: Pool, request: Arrival, at: float) -> bool:
        """See :class:`bench.scaling.pool.Rule`: by the router's price, of a prefill and a decode group as they are."""
        serving, ready = pool.serving(), pool.ready()
        if not self._convertible or not ready or pool.prefill[0] <= at or self._crowded(pool):
            return False
        there = math.ceil(len(pool.sent) / max(1, serving))
        waits = pool.prefill[0] - at
        prefill = Candidate(there, 0, waits, request.cached, request.cached)
        running, context = len(pool.running) / ready, pool.context / ready
        decode = Candidate(round(running), round(context), 0.0, request.cached, request.cached)
        ask = Ask(request.prompt, request.output)
        return price.decide(ask, [prefill], [decode], PRICES, self._rng, TTFT).prefill is None

    def lends(self, pool: Pool) -> bool:
        """See :class:`bench.scaling.pool.Rule`; half of the places of a decode group, up to a use of 0.7."""
        serving = pool.serving()
        return self._lending and len(pool.lent) < serving * BATCH // 2 and pool.use < 0.7 * serving

    def _count(self, pool: Pool) -> None:
        works = [work_of(request) for request in pool.came]
        done, self._ended = pool.ended[self._ended :], len(pool.ended)
        slow = math.log(pool.workload.slow)
        self._totals = self._totals.plus(Totals(
            requests=len(works), prompt_tokens=sum(r.prompt for r in pool.came),
            output_tokens=sum(r.output for r in pool.came), prefill=sum(works),
            prefill_squared=sum(work * work for work in works), streams=len(done),
            answered_tokens=sum(r.prompt for r in done), cached_tokens=sum(r.cached for r in done),
            streamed_tokens=sum(r.output for r in done), prefills=len(done), prefill_log=len(done) * slow,
            steps=len(done), step_log=len(done) * slow,
        ))  # fmt: skip
