"""Takes the samples: runs in pairs, order alternating, until the wanted number or the time budget is reached."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bench.harness.cell import Cell, Pair
from bench.harness.figures import Figures, figures

#: Runs per cell, and seconds after which a benchmark takes no further run (every cell always gets one).
FULL_RUNS, FULL_BUDGET = 7, 900.0
QUICK_RUNS, QUICK_BUDGET = 3, 40.0

#: Told before every run: cell, number of the run (from 1), wanted runs.
OnRun = Callable[[Cell, int, int], None]


def pair(cell: Cell, run: int) -> Pair:
    """Take both samples of one run; every second run takes the other one first, so that drift hurts neither."""
    if cell.beside is None:
        return Pair(cell.ours())
    if run % 2:
        ours = cell.ours()
        return Pair(ours, cell.beside())
    beside = cell.beside()
    return Pair(cell.ours(), beside)


def measure(
    cells: Sequence[Cell],
    *,
    runs: int,
    budget: float,
    on_run: OnRun,
    clock: Callable[[], float] = time.monotonic,
) -> list[Figures]:
    """Return the figures of all cells, interleaved: run 1 of every cell, then run 2 of every cell, and so on.

    A round that would end beyond ``budget`` seconds, judged by the longest round so far, is not started: fewer runs,
    never a cell without one.
    """
    taken: list[list[Pair]] = [[] for _ in cells]
    start, longest = clock(), 0.0
    for run in range(1, runs + 1):
        began = clock()
        if run > 1 and began - start + longest > budget:
            break
        for pairs, cell in zip(taken, cells, strict=True):
            on_run(cell, run, runs)
            pairs.append(pair(cell, run))
        longest = max(longest, clock() - began)
    return [figures(cell, pairs) for cell, pairs in zip(cells, taken, strict=True)]
