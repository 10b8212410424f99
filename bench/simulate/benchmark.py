"""What a simulated day and one decision cost. CPU seconds and memory of a process of its own, on one core.

The pool is 8 prefill and 16 decode groups with two routers and the price policy; the trace has 11.6 requests/s whose
prompts share a few beginnings, so a day of it is a million requests. ``TWINPOOL_DAY=1`` plays the whole day; otherwise
it is what requests cost once caches are full, which the growth cell allows.
"""

from __future__ import annotations

import os
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from random import Random
from typing import TYPE_CHECKING

from bench.harness.cell import Bar, Cell
from twinpool.core.economics import prices_of
from twinpool.core.kv import SHAPES
from twinpool.core.timing import ACCELERATORS
from twinpool.operator.logic.scaling import Limits, plan_scale
from twinpool.operator.logic.scaling_need import Demand, Group, Promise
from twinpool.simulate.pool import Setup, simulate
from twinpool.simulate.traces import BLOCK_TOKENS, Request

if TYPE_CHECKING:
    from collections.abc import Iterator

TITLE = "simulator: CPU of a day of a million requests, and of one decision"

_DAY, _REQUESTS = 86_400.0, 1_000_000
_PRICES = prices_of(SHAPES["llama-3-70b"], ACCELERATORS["h100"], 4)
_SETUP = Setup(_PRICES, 8, 16, 1_000_000, 1_000_000, conditional=True, routers=2)
_FAMILIES, _SHARED = 200, 4
_DECISIONS = 40


def trace(count: int, seed: int = 1) -> list[Request]:
    """Return ``count`` requests, a million a day: prompts of 3000 tokens, answers of 300 (exponential)."""
    dice, now, found = Random(seed), 0.0, []
    for number in range(count):
        now += dice.expovariate(_REQUESTS / _DAY)
        prompt = max(50, min(30_000, int(dice.expovariate(1 / 3000))))
        blocks, family = prompt // BLOCK_TOKENS, dice.randrange(_FAMILIES)
        shared = [family * 1000 + place for place in range(min(_SHARED, blocks))]
        own = [10_000_000 + number * 64 + place for place in range(blocks - len(shared))]
        found.append(Request(now, prompt, max(1, int(dice.expovariate(1 / 300))), (*shared, *own)))
    return found


def play(count: int) -> tuple[float, float]:
    """Return CPU seconds and GiB that ``count`` requests take, the making of the trace included."""
    begin = time.process_time()
    simulate(trace(count), _SETUP)
    return time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


@dataclass
class Runs:
    """Runs of ``least`` requests, of twice and of four times as many, each in a process of its own."""

    least: int
    whole: bool
    _found: dict[int, tuple[float, float]] = field(default_factory=dict)

    def growth(self) -> float:
        """Play all anew, and return what one of the last requests takes over what one of those before took."""
        self._found = {times: self._played(times * self.least) for times in (1, 2, 4)}
        return (self._found[4][0] - self._found[2][0]) / 2 / (self._found[2][0] - self._found[1][0])

    def minutes(self) -> float:
        """Return the CPU minutes of a day."""
        return self._day(0) / 60

    def gibibytes(self) -> float:
        """Return the memory of a day."""
        return self._day(1)

    def _day(self, which: int) -> float:
        if self.whole:
            self._found.setdefault(0, self._played(_REQUESTS))
            return self._found[0][which]
        least, most = self._found[2][which], self._found[4][which]
        return most + (most - least) / (2 * self.least) * (_REQUESTS - 4 * self.least)

    @staticmethod
    def _played(count: int) -> tuple[float, float]:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(play, count).result()


def decision() -> float:
    """Return the CPU milliseconds of one ``plan_scale`` that looks for as many as 1000 groups of each role."""
    promise, group, limits = Promise(2.0, 0.05), Group(1_000_000), Limits((1, 1000), (1, 1000), 4, 4, 6000)
    work = _PRICES.prefill(3000, 0)
    begin = time.process_time()
    for number in range(_DECISIONS):
        demand = Demand(5.0 + 40.0 * number, work, 3000, 300, 2 * work, 1.5, 2.0, 10.0)
        plan_scale(demand, _PRICES, promise, group, limits, (20, 20))
    return (time.process_time() - begin) / _DECISIONS * 1000


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Give the cells."""
    runs = Runs(3000 if quick else 10_000, os.environ.get("TWINPOOL_DAY") == "1")
    note = "the whole day" if runs.whole else f"by {4 * runs.least} of its requests; TWINPOOL_DAY=1 plays all"
    yield [
        Cell("one decision, up to 1000 groups of a role", "ms CPU", decision, None, Bar("ours", at_most=5.0)),
        Cell("a later request over an earlier one", "ratio", runs.growth, None, Bar("ours", at_most=1.25), "1: linear"),
        Cell("a day of a million requests", "min CPU", runs.minutes, None, Bar("ours", at_most=5.0), note),
        Cell("its memory", "GiB", runs.gibibytes, None, Bar("ours", at_most=2.0), note),
    ]
