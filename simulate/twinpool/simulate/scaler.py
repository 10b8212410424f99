"""The operator's autoscaler on a simulated pool: routers' reports in, numbers of groups out. Virtual time.

The decision is the one that the operator makes (``operator/logic/scaling_step.py``), as often and from the same
figures; what a start takes is known from the beginning here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from twinpool.core.units import parse_duration
from twinpool.operator.logic.autoscaler import TICK
from twinpool.operator.logic.scaling_report import Totals, Work
from twinpool.operator.logic.scaling_step import Seen, State, advance
from twinpool.operator.logic.scaling_window import Look, remembered, window
from twinpool.operator.logic.target import gpus
from twinpool.simulate.fleet import Life

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.scaling import Pair
    from twinpool.simulate.fleet import Loss
    from twinpool.simulate.pool import Pool
    from twinpool.simulate.routers import Router


@dataclass(frozen=True, slots=True)
class Change:
    """The numbers from ``at`` on, and why."""

    at: float
    pair: Pair
    reason: str


def life_of(pool: InferencePool, start: float, losses: Sequence[Loss] = (), rolls: Sequence[float] = ()) -> Life:
    """Return what befalls the groups of ``pool`` when a start takes ``start`` seconds."""
    each, scaling = gpus(pool.spec), pool.spec.scaling
    return Life(
        start, tuple(losses), (each.get("prefill", 1), each["decode"]),
        None if scaling is None else scaling.gpu_budget, 0.0 if scaling is None else parse_duration(scaling.window),
        tuple(rolls), pool.spec.rollout,
    )  # fmt: skip


class Scaler:
    """See the module. ``spec`` is the pool with its ``scaling``."""

    def __init__(self, spec: InferencePool, pool: Pool, routers: Sequence[Router], start: float) -> None:
        assert spec.spec.scaling is not None
        self._spec = spec
        self._scaling = spec.spec.scaling
        self._length = parse_duration(self._scaling.window)
        self._pool = pool
        self._routers = routers
        self._start = start
        self._state = State()
        self._looks: tuple[Look, ...] = ()
        self._before: Pair | None = None
        self.changes: list[Change] = []

    def run(self, until: float) -> None:
        """Look at the pool from now on: until ``until``, and then as long as anybody waits for anything."""
        self._look()
        clock = self._pool.clock
        if clock.now < until or self._pool.waiting or self._pool.fleet.busy():
            clock.at(clock.now + TICK, lambda: self.run(until))

    def _look(self) -> None:
        now, fleet = self._pool.clock.now, self._pool.fleet
        reports = [router.report() for router in self._routers]
        # Who came while a role had no group waits at some router.
        held = [len(self._pool.waiting), *([0] * (len(reports) - 1))]
        answers = {
            f"router {number}": Work(
                Totals(**asdict(report.arrivals)), report.waiting + held[number], report.prefill, report.decoding,
                self._pool.setup.decode_capacity,
            )
            for number, report in enumerate(reports)
        }  # fmt: skip
        self._looks = remembered(self._looks, Look(now, answers), self._length)
        work = window(self._looks, list(answers), now, self._length)
        recent = bool(self.changes) and now - self.changes[-1].at <= self._length
        seen = Seen(
            fleet.target, fleet.there(), work, self._start, fleet.serving(), before=self._before if recent else None
        )
        self._state, outcome = advance(self._state, self._spec, self._scaling, seen, now)
        if outcome.pair != fleet.target:
            fell = any(after < old for after, old in zip(outcome.pair, fleet.target, strict=True))
            self._before = fleet.target if fell else None
            self.changes.append(Change(now, outcome.pair, outcome.words or outcome.message))
        tokens: Counter[str] = Counter()
        for report in reports:
            tokens.update(report.tokens)
        fleet.resize(outcome.pair, tokens)
