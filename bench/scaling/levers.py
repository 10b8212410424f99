"""``python -m bench.scaling.levers``: what meets a burst that is shorter than a start. Simulated, on design workloads.

Every lever beside the planner as it is, with the GPU hours that it took: groups that prefill what would wait on the
other side, groups that change their role, and groups that are had beyond the need. ``--seeds`` and ``--only NAME``.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.scaling.pool import BATCH, TTFT, run
from bench.scaling.rules import Ours
from bench.scaling.workloads import BURSTS, DESIGN, Workload, arrivals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.scaling.pool import Pool, Result, Rule

#: Groups of both roles at the start; bursts need a pool in which there is something to shift.
_FIRST, _FIRST_OF_BURSTS = (2, 2), (4, 3)
#: Seconds for which a group keeps a role that it has changed to.
_HELD = 20.0


class Shifting(Ours):
    """Groups change their role when one role has no room and the other has; back when the first has room again."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._since = -_HELD

    def shifts(self, pool: Pool) -> int:
        """See :class:`bench.scaling.pool.Rule`."""
        way = self._way(pool, pool.serving(), pool.ready(), free=pool.now - self._since >= _HELD)
        if way:
            self._since = pool.now
        return way

    def _way(self, pool: Pool, prefill: int, decode: int, *, free: bool) -> int:
        places = decode * BATCH
        spare_prefill = prefill > 1 and pool.use < 0.7 * (prefill - 1)
        spare_decode = decode > 1 and pool.admitted < 0.7 * (places - BATCH)
        if pool.admitted >= 0.9 * places and spare_prefill:
            return 1
        if pool.backlog() > TTFT / 2 * prefill and pool.use > 0.9 * prefill and spare_decode and free:
            return -1
        if free and pool.shifted > 0 and spare_decode:
            return -1
        return 1 if free and pool.shifted < 0 and spare_prefill else 0


class Spare(Ours):
    """Has ``more`` groups than the planner asks for; they serve, since one that did not would be worse."""

    def __init__(self, workload: Workload, more: tuple[int, int]) -> None:
        super().__init__(workload)
        self._more = more

    def decide(self, pool: Pool) -> tuple[int, int]:
        """See :class:`bench.scaling.pool.Rule`."""
        there = pool.wanted
        pool.wanted = there[0] - self._more[0], there[1] - self._more[1]
        prefill, decode = super().decide(pool)
        pool.wanted = there
        return prefill + self._more[0], decode + self._more[1]


#: The first one is what the others are compared with.
LEVERS: dict[str, Callable[[Workload], Rule]] = {
    "decode prefills": Ours,
    "neither": partial(Ours, convertible=False),
    "and prefill writes": partial(Ours, lending=True),
    "and roles change": Shifting,
    "and one more prefill": partial(Spare, more=(1, 0)),
    "and one more decode": partial(Spare, more=(0, 1)),
}


def results(workload: Workload, lever: Callable[[Workload], Rule], seeds: int) -> list[Result]:
    """Run one lever on the first seeds of a workload."""
    first = _FIRST_OF_BURSTS if workload in BURSTS else _FIRST
    return [run(workload, arrivals(workload, seed), lever(workload), first) for seed in range(1, seeds + 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table; return 0."""
    parser = argparse.ArgumentParser(prog="bench.scaling.levers", description="levers for bursts (simulated)")
    parser.add_argument("--seeds", type=int, default=4, help="runs of each (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="NAME", help="workloads whose names contain this")
    arguments = parser.parse_args(argv)
    table = Table(title="requests in both objectives for GPU hours (simulated)")
    for column in ("workload", *LEVERS):
        table.add_column(column, justify="left" if column == "workload" else "right")
    every: dict[str, list[tuple[float, float]]] = {name: [] for name in LEVERS}
    for workload in (*DESIGN, *BURSTS):
        if arguments.only not in workload.name:
            continue
        for name, lever in LEVERS.items():
            runs = results(workload, lever, arguments.seeds)
            means = statistics.fmean(item.attained for item in runs), statistics.fmean(item.gpu_hours for item in runs)
            every[name].append(means)
        table.add_row(workload.name, *(_cell([points[-1]]) for points in every.values()))
    table.add_section()
    table.add_row("mean", *(_cell(points) for points in every.values()))
    console = Console()
    console.width = max(console.width, 180)
    console.print(table)
    return 0


def _cell(points: Sequence[tuple[float, float]]) -> str:
    return f"{statistics.fmean(p[0] for p in points):.4f} for {statistics.fmean(p[1] for p in points):.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
