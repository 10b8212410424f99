"""From a pool with ``scaling`` to the numbers that it is planned with, and what its status is to say of them. Pure.

The target in the status is written whole, by one field manager and at most once for each look, and only then acted
upon: whatever ends the operator in between, the next one finds either the old pair or the new one. A lost status
starts again from the groups that exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from twinpool.core.scaling import (
    MAX_DECISIONS,
    MAX_WORDS,
    ScalingDecision,
    ScalingFigures,
    ScalingStatus,
    ScalingTarget,
)
from twinpool.core.units import parse_duration
from twinpool.operator.logic import books, starts
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.observed import seconds, timestamp
from twinpool.operator.logic.scaling_step import Seen, State, advance
from twinpool.operator.logic.scaling_window import window
from twinpool.operator.logic.target import target, there

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.observed import Observed, PodView
    from twinpool.operator.logic.scaling import Pair
    from twinpool.operator.logic.scaling_step import Figures, Outcome
    from twinpool.operator.logic.scaling_window import Look

#: Seconds between two looks at a pool that scales, and between two writes of figures whose numbers stay.
TICK, REFRESH = 2.0, 30.0


@dataclass(frozen=True, slots=True)
class Scaled:
    """What was decided about a pool. ``write`` is the new ``status.scaling``, None when it may stay as it is."""

    outcome: Outcome
    write: Mapping[str, Any] | None = None
    #: Whether the numbers change with it.
    changes: bool = False

    def gist(self) -> object:
        """Return what the plan turns on; figures change all the time."""
        return self.outcome.pair, self.outcome.reason, self.write is not None


def to_ask(observed: Observed) -> list[PodView]:
    """Return the routers whose work is to be known: all of a pool that scales."""
    return books.routers(observed.pods) if observed.pool.spec.scaling is not None else []


def scaled(observed: Observed, state: State, looks: Sequence[Look], now: float) -> tuple[Observed, State]:
    """Return the pool with its target in place and the decision of this moment, and what is to be remembered."""
    pool, scaling = observed.pool, observed.pool.spec.scaling
    if scaling is None:
        return observed, State()
    members = groups(observed)
    existing = there(members)
    if pool.status.scaling is None:
        pool = _adopted(pool, existing, now)
    if state == State():
        state = _inherited(pool)
    length = parse_duration(scaling.window)
    serving = [pod.name for pod in books.serving_routers(observed.pods)]
    work = window(looks, serving, now, length) if looks else "the routers have not been asked yet"
    took = starts.times(observed.pods)
    seen = Seen(
        target(pool, scaling), existing, work, starts.usual(took), starts.serving(members),
        starts.late(members, starts.patience(took), now), _before(pool, length, now),
    )  # fmt: skip
    state, outcome = advance(state, pool, scaling, seen, now)
    return replace(observed, pool=pool, scaling=_scaled(observed.pool, seen.target, outcome, now)), state


def _before(pool: InferencePool, length: float, now: float) -> Pair | None:
    """Return the numbers before the last change, if it let groups go and is watched still."""
    stored = pool.status.scaling
    if stored is None or not stored.decisions:
        return None
    last = stored.decisions[0]
    recent = now - (seconds(last.time) or 0.0) <= length
    fell = last.after.prefill < last.before.prefill or last.after.decode < last.before.decode
    return (last.before.prefill, last.before.decode) if recent and fell else None


def _inherited(pool: InferencePool) -> State:
    """Return what an operator that has just begun knows: how fast the engines are, as its predecessor learnt it."""
    stored = pool.status.scaling
    if stored is None or stored.figures is None:
        return State()
    return State(prefill_factor=stored.figures.prefill_factor, step_factor=stored.figures.step_factor)


def _adopted(pool: InferencePool, existing: Pair, now: float) -> InferencePool:
    """Return the pool with the groups that exist as its target; with the numbers of its spec while there are none."""
    scaling = pool.spec.scaling
    assert scaling is not None
    pair = existing if any(existing) else target(pool, scaling)
    stored = ScalingStatus(target=_pair(pair), time=timestamp(now))
    return pool.model_copy(update={"status": pool.status.model_copy(update={"scaling": stored})})


def _scaled(pool: InferencePool, adopted: Pair, outcome: Outcome, now: float) -> Scaled:
    """Return the decision with what is to be written: new numbers, or figures where those in the status are old."""
    stored = pool.status.scaling
    before = adopted if stored is None else (stored.target.prefill, stored.target.decode)
    changes = before != outcome.pair
    fresh = stored is not None and (outcome.figures is None or now - (seconds(stored.time) or 0.0) < REFRESH)
    if fresh and not changes:
        return Scaled(outcome)
    words = (outcome.words or outcome.message)[:MAX_WORDS]
    decisions = stored.decisions if stored else ()
    if changes:
        made = ScalingDecision(time=timestamp(now), before=_pair(before), after=_pair(outcome.pair), reason=words)
        decisions = (made, *decisions)[:MAX_DECISIONS]
    body = ScalingStatus(
        target=_pair(outcome.pair),
        reason=words,
        time=timestamp(now),
        figures=None if outcome.figures is None else _figures(outcome.figures),
        decisions=decisions,
    )
    return Scaled(outcome, body.model_dump(mode="json", by_alias=True, exclude_none=True), changes)


def _pair(pair: Pair) -> ScalingTarget:
    return ScalingTarget(prefill=pair[0], decode=pair[1])


def _figures(figures: Figures) -> ScalingFigures:
    demand = figures.demand
    prefill, decode = (None if math.isinf(need) else int(need) for need in figures.need)
    return ScalingFigures(
        requests_per_second=_short(demand.rate),
        prefill_seconds=_short(demand.prefill),
        prompt_tokens=_short(demand.prompt),
        output_tokens=_short(demand.output),
        hit_rate=_short(figures.hit_rate),
        backlog_seconds=_short(demand.backlog),
        decoding=_short(demand.flying),
        waiting=figures.waiting,
        prefill_factor=_short(figures.prefill_factor),
        step_factor=_short(figures.step_factor),
        start_seconds=_short(figures.start),
        need_prefill=prefill,
        need_decode=decode,
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")
