"""How many requests keep both objectives, at equal GPU hours: our planner beside published rules. Simulated.

A cell is a workload. Each run is another seed, the same for all. Each rule of others has one knob with five values;
what it reaches at the GPU hours that ours took is read from the line through its points. Regret is the attainment of
the best of them less ours. The bars were set before the first look: 0.01 in the mean, 0.03 in the worst cell, and no
more changes than the median of the rules, each at the knob that is nearest in GPU hours.
"""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.harness.cell import Bar, Cell
from bench.scaling.planners import (
    DecodeTokens,
    QueueLength,
    QueueModel,
    Throughput,
    TokenVelocity,
    TwoLoops,
)
from bench.scaling.pool import BATCH, PRICES, Result, run, work_of
from bench.scaling.rules import MOST, Concurrency, Ours, Static, Utilisation
from bench.scaling.workloads import LENGTH, WORKLOADS, Workload, arrivals
from twinpool.simulate.scores import interval

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.scaling.pool import Rule
    from bench.scaling.workloads import Arrival

TITLE = "scaling: regret in SLO attainment at equal GPU hours (simulated)"

#: Set before the first look.
MEAN_REGRET, WORST_REGRET = 0.01, 0.03
#: Lower seeds were used while the benchmark was written.
_FIRST_SEED = 2000
_FIRST = (2, 2)
_OURS, _ALWAYS, _MEAN, _PEAK = "ours", "ours, always handed off", "static mean", "static peak"
_UNRANKED = (_OURS, _ALWAYS, _MEAN, _PEAK)
_NOTE = (
    "simulated, not measured, in a pool that is simpler than a real one; rules of others are written anew from what is "
    "published. Ours knows from the start how slow the engines are, which takes it a few requests in a pool"
)
_PLANNERS = (
    "the best of nine rules in each cell, which is more than any of them reaches; ours and TokenScale's decode groups "
    "prefill what would wait"
)


@dataclass
class Place:
    """One workload, and what every rule at every knob reached in each of its runs."""

    workload: Workload
    #: Seeds of one run.
    seeds: int
    found: dict[tuple[str, float], list[Result]] = field(default_factory=dict)

    def run(self) -> float:
        """Simulate more seeds with every rule, and return the regret over all seeds so far."""
        for _ in range(self.seeds):
            self.take(len(self.found.get((_OURS, 0.0), ())))
        return self.regret()

    def take(self, number: int, prefix: str = "") -> None:
        """Simulate the seed of this number, counted from 0, with the rules of that prefix that have not had it yet."""
        requests = arrivals(self.workload, _FIRST_SEED + number)
        for key, make in _rules(self.workload, requests).items():
            if key[0].startswith(prefix) and len(self.found.get(key, ())) == number:
                self.found.setdefault(key, []).append(run(self.workload, requests, make(), _FIRST))

    def forget(self, prefix: str) -> None:
        """Forget all runs of rules of that prefix."""
        self.found = {key: runs for key, runs in self.found.items() if not key[0].startswith(prefix)}

    def point(self, key: tuple[str, float]) -> tuple[float, float]:
        """Return mean GPU hours and attainment."""
        runs = self.found[key]
        return statistics.fmean(item.gpu_hours for item in runs), statistics.fmean(item.attained for item in runs)

    def others(self) -> dict[str, float]:
        """Return what each rule reaches at our GPU hours."""
        hours, _ = self.point((_OURS, 0.0))
        names = dict.fromkeys(name for name, _ in self.found if name not in _UNRANKED)
        return {name: _at([self.point(key) for key in self.found if key[0] == name], hours) for name in names}

    def regret(self) -> float:
        """Return how far ours is behind the best other rule at equal GPU hours; 0 where it is ahead."""
        return max(0.0, max(self.others().values()) - self.point((_OURS, 0.0))[1])

    def changes(self) -> float:
        """Return our changes over the median of the rules, each at the knob nearest in GPU hours."""
        hours, _ = self.point((_OURS, 0.0))
        nearest = [
            min((key for key in self.found if key[0] == name), key=lambda key: abs(self.point(key)[0] - hours))
            for name in self.others()
        ]
        counts = [statistics.fmean(item.changes for item in self.found[key]) for key in nearest]
        ours = statistics.fmean(item.changes for item in self.found[_OURS, 0.0])
        return ours / max(1.0, statistics.median(counts))


def _at(points: list[tuple[float, float]], hours: float) -> float:
    """Return the attainment at ``hours``: on the line between the points beside it, or of a cheaper point if better.

    A rule that never was so cheap is given its cheapest point, for more GPU hours than ours.
    """
    points = sorted(points)
    best = [points[0][1], *(attained for used, attained in points if used <= hours)]
    for (low, first), (high, second) in pairwise(points):
        if low <= hours <= high:
            best.append(first + (second - first) * (hours - low) / max(1e-9, high - low))
    return max(best)


def _rules(workload: Workload, requests: Sequence[Arrival]) -> dict[tuple[str, float], Callable[[], Rule]]:
    mean, peak, ratio = _sizes(workload, requests)
    rules: dict[tuple[str, float], Callable[[], Rule]] = {(_OURS, 0.0): lambda: Ours(workload)}
    rules |= {("HPA use", knob): partial(Utilisation, knob) for knob in (0.4, 0.5, 0.6, 0.7, 0.8)}
    rules |= {("ratio band", knob): partial(Utilisation, knob, ratio) for knob in (0.3, 0.45, 0.6, 0.75, 0.85)}
    rules |= {("KPA", knob): partial(Concurrency, knob) for knob in (0.4, 0.6, 0.8, 1.0, 1.5)}
    rules |= {("HPA queue", knob): partial(QueueLength, knob) for knob in (0.25, 0.5, 1.0, 2.0, 4.0)}
    uses = (0.4, 0.55, 0.7, 0.85, 1.0)
    rules |= {("Dynamo throughput", knob): partial(Throughput, knob) for knob in uses}
    rules |= {("Dynamo two loops", knob): partial(TwoLoops, knob) for knob in uses}
    rules |= {("WVA", knob): partial(QueueModel, knob) for knob in uses}
    rules |= {("TokenScale", knob): partial(TokenVelocity, knob) for knob in (1.0, 1.2, 1.5, 1.8, 2.2)}
    rules |= {("HeteroScale", knob): partial(DecodeTokens, knob, ratio) for knob in (0.3, 0.45, 0.6, 0.75, 0.9)}
    rules[(_ALWAYS, 0.0)] = lambda: Ours(workload, convertible=False)
    rules[(_MEAN, 0.0)] = lambda: Static(mean)
    rules[(_PEAK, 0.0)] = lambda: Static(peak)
    return rules


def _sizes(workload: Workload, requests: Sequence[Arrival]) -> tuple[tuple[int, int], tuple[int, int], float]:
    """Return what a clairvoyant would fix for the mean and for the busiest minute at 70 %, and the mean ratio."""
    loads = [[0.0, 0.0] for _ in range(int(LENGTH / 60))]
    for request in requests:
        context = request.prompt + request.output / 2
        loads[int(request.at / 60)][0] += work_of(request) * workload.slow / 60
        loads[int(request.at / 60)][1] += (
            request.output * PRICES.step(BATCH, BATCH * context) * workload.slow / BATCH / 60
        )
    means = [statistics.fmean(load[role] for load in loads) for role in (0, 1)]
    peaks = [max(load[role] for load in loads) for role in (0, 1)]
    fixed = [tuple(min(MOST, max(1, round(value / 0.7 + 0.5))) for value in values) for values in (means, peaks)]
    return (fixed[0][0], fixed[0][1]), (fixed[1][0], fixed[1][1]), means[0] / means[1]


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Give a cell for each workload, and for the mean and the worst of all; print what every rule reached."""
    places = [Place(workload, 1 if quick else 2) for workload in (WORKLOADS[:2] if quick else WORKLOADS)]
    rows = [Cell(place.workload.name, "regret", place.run, None, None, _NOTE) for place in places]
    mean, worst, changes = figures(places)
    # After the others in every round, so that they have the runs of this one.
    rows.append(Cell("mean of the cells", "regret", mean, None, Bar("ours", at_most=MEAN_REGRET), _PLANNERS))
    rows.append(Cell("worst cell", "regret", worst, None, Bar("ours", at_most=WORST_REGRET), _PLANNERS))
    rows.append(Cell("changes, over the median of the rules", "ratio", changes, None, Bar("ours", at_most=1.0), _NOTE))
    yield rows
    show(places)


def figures(places: Sequence[Place]) -> tuple[Callable[[], float], Callable[[], float], Callable[[], float]]:
    """Return what tells the mean regret, the worst one, and changes over the median of the rules."""
    return (
        lambda: statistics.fmean(place.regret() for place in places),
        lambda: max(place.regret() for place in places),
        lambda: statistics.fmean(place.changes() for place in places),
    )


def show(places: Sequence[Place]) -> None:
    """Print attainment (with its 95 % interval), GPU hours and changes of ours, and what others reach beside it."""
    table = Table(title="ours, and the attainment of others at our GPU hours; * where ours is behind")
    for column in ("workload", "ours", "GPU h", "changes", *(places[0].others() if places[0].found else ())):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for column in _UNRANKED[1:]:
        table.add_column(f"{column} (unranked)", justify="right")
    for place in places:
        if not place.found:
            continue
        ours = place.found[_OURS, 0.0]
        mean, half = interval([item.attained for item in ours])
        hours, _ = place.point((_OURS, 0.0))
        fixed = [place.point((name, 0.0)) for name in _UNRANKED[1:]]
        table.add_row(
            place.workload.name + (" *" if place.regret() > 0 else ""),
            f"{mean:.3f} ±{half:.3f}", f"{hours:.2f}", f"{statistics.fmean(item.changes for item in ours):.1f}",
            *(f"{value:.3f}" for value in place.others().values()),
            *(f"{value:.3f} for {used:.2f}" for used, value in fixed),
        )  # fmt: skip
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table)
