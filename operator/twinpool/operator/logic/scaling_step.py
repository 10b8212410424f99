"""What the autoscaler decides at each look at a pool: the numbers to have, in which state it is, and why. Pure.

Always true: without figures the numbers stay; groups go only after this process has had figures without a gap for as
long as scaling in is held back; while groups that are wanted do not exist yet, numbers only fall, so that no two
changes are under way at once; both numbers change together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from twinpool.core.economics import ASSUMED
from twinpool.core.units import parse_duration
from twinpool.operator.logic.engine_limits import sequences
from twinpool.operator.logic.losses import Loss, noticed, spares
from twinpool.operator.logic.scaling import Decision, Limits, Needs, Pair, cheapest, plan_scale
from twinpool.operator.logic.scaling_need import Demand, Group, Promise, largest_batch, suffering
from twinpool.operator.logic.target import limits as limits_of
from twinpool.operator.logic.trend import Jump, Rate, in_flight, leapt, remembered, slope, standing, surge

if TYPE_CHECKING:
    from twinpool.core.economics import Prices
    from twinpool.core.scaling import Scaling
    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.scaling_window import Window

#: Timings of a window from which on it is believed over what was learnt before.
_ENOUGH = 3
#: The most that a rate is taken to grow until a new group is up.
_MOST_GROWTH = 3.0
#: 90th percentile of a normal variable in standard deviations; of an exponential one it is 2.3 means, and this gives
#: 2.28 there.
_LONG = 1.28
#: Sequences that an engine runs at once where its arguments do not say (vLLM's max_num_seqs on most GPUs).
_SEQUENCES = 256
#: KV room where no router knows it: batches are then bound by time and by sequences alone.
_ROOM = 10**12


@dataclass(frozen=True, slots=True)
class State:
    """What is remembered of a pool from one look to the next. Losing it only delays scaling in."""

    #: Since when there have been figures without a gap; None while there are none.
    since: float | None = None
    #: Needs with their times, as far back as a scale-in is held.
    needs: tuple[tuple[float, Needs], ...] = ()
    prefill_factor: float = 1.0
    step_factor: float = 1.0
    #: Earlier rates of requests, as far back as a group takes to start.
    rates: tuple[Rate, ...] = ()
    #: Sudden rises of the last hour.
    jumps: tuple[Jump, ...] = ()
    #: Groups lost in the last day, since when one looks, and those that served at the last look.
    losses: tuple[Loss, ...] = ()
    watched: float | None = None
    served: Pair = (0, 0)


@dataclass(frozen=True, slots=True)
class Figures:
    """What a decision was made from; seconds as observed, not as the model has them."""

    demand: Demand
    hit_rate: float
    waiting: int
    prefill_factor: float
    step_factor: float
    start: float
    need: Needs


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers to have, a CamelCase reason with its words for the condition, and the reason of the numbers."""

    pair: Pair
    reason: str
    message: str
    words: str = ""
    figures: Figures | None = None

    @property
    def active(self) -> bool:
        """Return whether numbers follow the work."""
        return self.figures is not None


@dataclass(frozen=True, slots=True)
class Seen:
    """A pool at one moment: the target that it has, the groups that there are, and what its routers report."""

    target: Pair
    groups: Pair
    work: Window | str
    #: Seconds that groups took to get ready lately, 0 when none did.
    start: float = 0.0
    #: Groups of ``groups`` that serve; None: all of them.
    serving: Pair | None = None
    #: Groups that take so long to start that nothing is expected of them.
    late: Pair = (0, 0)
    #: The numbers before groups were let go, as long as it is watched whether they are missed.
    before: Pair | None = None


def advance(state: State, pool: InferencePool, scaling: Scaling, seen: Seen, now: float) -> tuple[State, Outcome]:
    """Return what is to be remembered, and what is decided at ``now`` (seconds since 1970)."""
    bounds = limits_of(pool, scaling)
    held = cheapest(seen.target, bounds)
    if isinstance(seen.work, str):
        return replace(state, since=None, needs=()), Outcome(
            held, "NoFigures", f"the numbers stay as they are: {seen.work}"
        )
    work = seen.work
    since = now if state.since is None else state.since
    learnt = _learnt(state, work)
    newest = Rate(now, work.totals.requests / work.seconds, work.seconds)
    rates, jumps = remembered(state.rates, newest, seen.start), state.jumps
    if rates[-1] is newest:
        jumps = leapt(jumps, state.rates, newest)
    learnt = _watched(learnt, seen, now)
    prices, promise = ASSUMED.scaled(learnt.step_factor), promise_of(pool)
    group = Group(work.kv_tokens or _ROOM, sequences(pool) or _SEQUENCES)
    growth = max(
        growth_of(work, seen.start, slope(state.rates, newest, seen.start, jumps)),
        surge(jumps, newest, since, seen.start, promise.miss),
    )
    demand = _ahead(demand_of(work, learnt), seen, prices, promise, group)
    hold_in = parse_duration(scaling.stabilization.scale_in)
    hold_out = parse_duration(scaling.stabilization.scale_out)
    patient = now - since >= max(hold_in, parse_duration(scaling.window))
    recent = [need for at, need in state.needs if at >= now - hold_in]
    steady = [need for at, need in state.needs if at >= now - hold_out]
    decision = plan_scale(
        demand,
        prices,
        promise,
        group,
        bounds,
        held,
        recent if patient else [*recent, held],
        growth,
        steady if now - since >= hold_out else [*steady, held],
        seen.late,
        spares(learnt.losses, learnt.watched or now, now, seen.start, promise.miss),
    )
    need = (decision.need.prefill, decision.need.decode) if decision.need else held
    figures = Figures(
        demand.times(growth), _hit(work), work.waiting, learnt.prefill_factor,
        learnt.step_factor, seen.start, need,
    )  # fmt: skip
    kept = tuple((at, old) for at, old in state.needs if at >= now - max(hold_in, hold_out))
    learnt = replace(learnt, since=since, needs=(*kept, (now, need)), rates=rates, jumps=jumps)
    back, words = _missed(seen, suffering(demand_of(work, learnt), prices, promise, group, held))
    if words:
        pair = cheapest(back, bounds)
        # What was missed once is not let go again before it was not needed for as long as ever.
        learnt = replace(learnt, needs=(*learnt.needs, (now, (float(pair[0]), float(pair[1])))))
        message = "an objective suffered after groups were let go: they are put back"
        return learnt, Outcome(pair, "PutBack", message, f"{words} after groups were let go", figures)
    return learnt, _outcome(seen, held, bounds, decision, figures)


def _outcome(seen: Seen, held: Pair, bounds: Limits, decision: Decision, figures: Figures) -> Outcome:
    work = seen.work
    assert not isinstance(work, str)
    if work.asked and 0 in held:
        pair = cheapest((max(1, held[0]), max(1, held[1])), bounds)
        if pair != held:
            words = f"somebody asks ({work.waiting} requests wait), and there is no group of a role"
            return Outcome(pair, "FromZero", "requests came for a role without groups", words, figures)
    pair = decision.prefill, decision.decode
    if work.asked:
        # A long answer may outlast the window in which it arrived.
        pair = max(pair[0], min(1, held[0])), max(pair[1], min(1, held[1]))
    if any(there < wanted for there, wanted in zip(seen.groups, held, strict=True)):
        if pair[0] > held[0] or pair[1] > held[1]:
            pair = held
        return Outcome(pair, "Changing", "groups of the last change are yet to be made", decision.reason, figures)
    if any(math.isinf(need) for need in figures.need):
        message = "an objective is shorter than one request alone takes; no number of groups keeps it"
        return Outcome(pair, "ObjectiveOutOfReach", message, decision.reason, figures)
    if not decision.enough and not _fits(figures.need, pair):
        message = "the arriving work needs more groups than max, ratio or gpuBudget allow"
        return Outcome(pair, "Limited", message, decision.reason, figures)
    return Outcome(pair, "Following", "the numbers follow the arriving work", decision.reason, figures)


def _missed(seen: Seen, words: tuple[str, str]) -> tuple[Pair, str]:
    """Return the numbers with those put back that were let go lately of a role that suffers, and what it suffers."""
    if seen.before is None:
        return seen.target, ""
    missed = [bool(text) and old > now for text, old, now in zip(words, seen.before, seen.target, strict=True)]
    back = [old if miss else now for miss, old, now in zip(missed, seen.before, seen.target, strict=True)]
    return (back[0], back[1]), " and ".join(text for text, miss in zip(words, missed, strict=True) if miss)


def _fits(need: Needs, pair: Pair) -> bool:
    return all(least <= have for least, have in zip(need, pair, strict=True))


def _learnt(state: State, work: Window) -> State:
    """Return the state with the factors of this window, where it holds enough timings."""
    totals = work.totals
    if totals.prefills >= _ENOUGH:
        state = replace(state, prefill_factor=math.exp(totals.prefill_log / totals.prefills))
    if totals.steps >= _ENOUGH:
        state = replace(state, step_factor=math.exp(totals.step_log / totals.steps))
    return state


def _watched(state: State, seen: Seen, now: float) -> State:
    """Return the state with the groups that were lost since the last look."""
    serving = seen.groups if seen.serving is None else seen.serving
    losses = noticed(state.losses, state.served, serving, seen.target, now)
    return replace(state, losses=losses, served=serving, watched=now if state.watched is None else state.watched)


def _hit(work: Window) -> float:
    return work.totals.cached_tokens / work.totals.answered_tokens if work.totals.answered_tokens else 0.0


def demand_of(work: Window, learnt: State) -> Demand:
    """Return the arriving work in seconds as they are observed."""
    totals, requests = work.totals, work.totals.requests
    if not requests:
        waits = work.waiting * ASSUMED.prefill(1, 0) + work.prefill
        return Demand(0.0, 0.0, 0.0, 0.0, 0.0, backlog=waits * learnt.prefill_factor, flying=work.decoding)
    mean = totals.prefill / requests
    variation = max(0.0, totals.prefill_squared / requests / mean**2 - 1) if mean else 0.0
    longest = mean * (1 + _LONG * math.sqrt(variation))
    # What is in service waits for nobody: of the work at prefill workers, that of one request is done at a time.
    waits = max(0.0, work.prefill - mean * min(requests, 1 + totals.prefill / work.seconds)) + work.waiting * mean
    factor = learnt.prefill_factor
    return Demand(
        rate=requests / work.seconds,
        prefill=mean * factor,
        prompt=totals.prompt_tokens / requests,
        output=totals.streamed_tokens / totals.streams if totals.streams else totals.output_tokens / requests,
        long_prefill=longest * factor,
        prefill_variation=variation,
        arrival_variation=work.dispersion,
        backlog=waits * factor,
        flying=work.decoding,
    )


def growth_of(work: Window, start: float, trend: float = 0.0) -> float:
    """Return by how much the rate will have grown when a group that is begun now is up.

    ``trend`` is its slope over a longer time. The rate of a window is that of its middle.
    """
    rate = work.totals.requests / work.seconds
    ahead = max(work.slope * start, trend * (start + work.seconds / 2))
    return min(_MOST_GROWTH, 1 + ahead / rate) if rate > 0 else 1.0


def _ahead(demand: Demand, seen: Seen, prices: Prices, promise: Promise, group: Group) -> Demand:
    """Return the demand with what still waits, of prefill and of decode, when a group that is begun now is up.

    While prompts wait too long for prefill, routers have decode workers compute some: what is there then is no sign of
    longer answers, and more decode groups in place of prefill would make it worse.
    """
    prefill, decode = seen.groups if seen.serving is None else map(min, seen.groups, seen.serving)
    load = demand.rate * demand.prefill
    backlog = standing(demand.backlog, load, prefill, seen.groups[0] - prefill, seen.start)
    batch = largest_batch(demand, prices, promise.itl, group)
    slot = demand.output * prices.step(batch, batch * (demand.prompt + demand.output / 2))
    waits, _ = suffering(demand, prices, promise, group, seen.groups)
    flying = 0.0 if waits else in_flight(demand.flying, decode * batch, slot, group.drain)
    return replace(demand, backlog=backlog, flying=flying)


def promise_of(pool: InferencePool) -> Promise:
    """Return the objectives; those that are missing, which the API server refuses, are met by everything."""
    objectives = pool.spec.objectives
    return Promise(
        parse_duration(objectives.ttft) if objectives.ttft else math.inf,
        parse_duration(objectives.itl) if objectives.itl else math.inf,
        1 - objectives.percentile / 100,
    )
