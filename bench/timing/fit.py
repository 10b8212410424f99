"""Prices of a real engine from the times of its steps. Pure; seconds and tokens.

The form that the simulator has, where arithmetic alone binds: a step that reads n tokens of one prompt and writes for
``batch`` sequences with ``context`` tokens takes a + b (n + batch) + c (n^2 / 2 + batch / 2 + context). No coefficient
is negative. What is made small is the error in proportion, after the median of steps that are alike: a stall is one
vote of many.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

from twinpool.core.economics import Prices

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine: prompt tokens that it read, sequences that it wrote for, and the tokens before them."""

    new: float
    batch: float
    context: float
    seconds: float


def fit(steps: Iterable[Step]) -> Prices:
    """Return the prices under which ``steps`` would have taken about as long as they did."""
    rows = [
        ((1.0, step.new + step.batch, step.new**2 / 2 + step.batch / 2 + step.context), step.seconds)
        for step in typical(steps)
    ]
    overhead, token, pair = least_squares(rows)
    return Prices(overhead, 0.0, 0.0, token, pair, 0.0, 0.0)


def typical(steps: Iterable[Step]) -> list[Step]:
    """Return for all steps that read as much for as large a batch and about as much context the medians of the rest."""
    alike: dict[tuple[float, float, str], list[Step]] = defaultdict(list)
    for step in steps:
        alike[step.new, step.batch, f"{step.context:.1g}"].append(step)
    return [
        Step(new, batch, median(one.context for one in several), median(one.seconds for one in several))
        for (new, batch, _), several in alike.items()
    ]


def least_squares(samples: Sequence[tuple[tuple[float, ...], float]]) -> list[float]:
    """Return the coefficients, none negative, with the least sum of squares of (fitted / observed - 1).

    Every choice of coefficients that are not 0 is tried, which is exact and quick for a handful.
    """
    rows = [[value / seconds for value in what] for what, seconds in samples]
    count = len(rows[0])
    best, least = [0.0] * count, float(len(rows))
    for size in range(1, count + 1):
        for places in combinations(range(count), size):
            solved = _solved([[row[place] for place in places] for row in rows])
            if solved is None or min(solved) < 0:
                continue
            error = sum((sum(x * row[p] for x, p in zip(solved, places, strict=True)) - 1) ** 2 for row in rows)
            if error < least:
                least, best = error, [0.0] * count
                for place, value in zip(places, solved, strict=True):
                    best[place] = value
    return best


def _solved(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Return x with the least squares of ``rows`` x - 1 by the normal equations; None where they leave it open."""
    size = len(rows[0])
    # Columns of one size: tokens squared beside ones would lose digits.
    scales = [max(abs(row[place]) for row in rows) or 1.0 for place in range(size)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    work = [[*(sum(r[i] * r[j] for r in scaled) for j in range(size)), sum(r[i] for r in scaled)] for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda place: abs(work[place][column]))
        if abs(work[pivot][column]) < 1e-9:
            return None
        work[column], work[pivot] = work[pivot], work[column]
        for place in range(size):
            if place != column:
                share = work[place][column] / work[column][column]
                work[place] = [value - share * top for value, top in zip(work[place], work[column], strict=True)]
    return [work[place][size] / work[place][place] / scales[place] for place in range(size)]
