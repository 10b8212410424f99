"""SLO attainment of Twinpool's price beside published routing rules, on traces, in virtual time: nothing is measured.

A cell is a trace, a load, a kind of index and a number of routers. Each run is another sample of the trace, the same
for every rule. Regret is the attainment of the best rule of the cell less that of price; the bars were set before the
first look: 0.01 in the mean, 0.03 in the worst cell.
"""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.harness.cell import Bar, Cell
from bench.routing.traces import AZURE_CHAT, AZURE_CODE, CONVERSATION, SYNTHETIC, Source, load
from twinpool.core.economics import prices_of
from twinpool.core.kv import SHAPES
from twinpool.core.timing import ACCELERATORS
from twinpool.router.logic.copies import INTERVAL_SECONDS
from twinpool.simulate.pool import Setup, simulate
from twinpool.simulate.rules import OURS, RULES
from twinpool.simulate.scores import interval, pooled_hit, score
from twinpool.simulate.traces import sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.simulate.traces import Request
    from twinpool.simulate.views import Kind

TITLE = "routing: regret in SLO attainment (simulated)"

#: LLaMA-3-70B on eight A100, as in Mooncake's own evaluation; objectives likewise (TTFT 10 s, tokens every 100 ms).
_PRICES = prices_of(SHAPES["llama-3-70b"], ACCELERATORS["a100"], gpus=8)
_PREFILL, _DECODE = 6, 4
_CACHE, _ROOM = 1_000_000, 800_000
_TTFT, _ITL = 10.0, 0.1
#: A load of 1 keeps the prefill workers busy for this share of the time if the pool's caches were one.
_USE = 0.8
#: Share of a trace in one sample.
_SHARE = 0.5
#: Where samples begin to be drawn; lower seeds were used while the price was designed.
_FIRST_SEED = 1000
#: Seconds between two looks of routers at each other's books, as in production; all rules choose by them.
_EXCHANGE = INTERVAL_SECONDS
MEAN_REGRET, WORST_REGRET = 0.01, 0.03
_NOTE = (
    "simulated, not measured: rules of others are written anew from what is published, with their defaults; no rule "
    "moves KV between prefill workers or prefills on decode"
)


@dataclass
class Place:
    """One cell, and what every rule reached in each of its runs."""

    source: Source
    load: float
    index: Kind = "exact"
    routers: int = 1
    found: dict[str, list[float]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the cell's name."""
        more = "" if self.index == "exact" else f", {self.index} index"
        more += "" if self.routers == 1 else f", {self.routers} routers"
        return f"{self.source.name} x {self.load:g}{more}"

    def run(self, rules: tuple[str, ...]) -> float:
        """Simulate one more sample with every rule, and return the regret in that sample."""
        seed = _FIRST_SEED + len(self.found.get(OURS, ()))
        trace, work = _trace(self.source)
        speed = self.load * _USE * _PREFILL / work
        requests = sample(trace, _SHARE, speed, Random(seed))
        for rule in rules:
            setup = Setup(
                _PRICES, _PREFILL, _DECODE, _CACHE, _ROOM, rule, routers=self.routers, exchange=_EXCHANGE,
                index=self.index, seed=seed, ttft=_TTFT,
            )  # fmt: skip
            self.found.setdefault(rule, []).append(score(simulate(requests, setup), _TTFT, _ITL).attainment)
        return max(values[-1] for values in self.found.values()) - self.found[OURS][-1]

    def regret(self) -> float:
        """Return the regret against the rule that was best over all runs so far."""
        best = max(statistics.fmean(values) for values in self.found.values())
        return best - statistics.fmean(self.found[OURS])


@cache
def _trace(source: Source) -> tuple[tuple[Request, ...], float]:
    """Return a trace, and the seconds of prefill that it brings each second, hits of a pooled cache taken off."""
    trace = load(source)
    seconds = sum(_PRICES.prefill(request.prompt, 0) for request in trace)
    return trace, seconds * (1 - pooled_hit(trace, _PREFILL * _CACHE)) / trace[-1].arrival


def places(quick: bool) -> list[Place]:
    """Return the cells, without any run."""
    if quick:
        return [Place(SYNTHETIC, 1.0)]
    found = [Place(source, load) for source in (CONVERSATION, SYNTHETIC) for load in (0.7, 0.85, 1.0, 1.15)]
    found += [Place(source, load) for source in (AZURE_CODE, AZURE_CHAT) for load in (0.85, 1.0)]
    for source in (CONVERSATION, SYNTHETIC):
        found += [Place(source, 1.0, "late"), Place(source, 1.0, "approximate")]
        found += [Place(source, 1.0, routers=2), Place(source, 1.0, routers=4)]
    return found


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Give a cell for each place, and one for the mean of all; print what every rule reached at the end."""
    every = places(quick)
    for place in every:
        _trace(place.source)
    rules = ("least-load", "llm-d", OURS) if quick else tuple(rule for rule in RULES if rule != "random")
    rows = [
        Cell(str(place), "regret", lambda place=place: place.run(rules), None, None, _NOTE)  # type: ignore[misc]
        for place in every
    ]
    # After the others in every round, so that they have the runs of this one.
    rows.append(
        Cell("mean of the cells", "regret", lambda: _mean(every), None, Bar("ours", at_most=MEAN_REGRET), _MEAN)
    )
    rows.append(Cell("worst cell", "regret", lambda: _worst(every), None, Bar("ours", at_most=WORST_REGRET), _MEAN))
    yield rows
    show(every)


_MEAN = "mean and worst: against the rule that was best over all runs so far; the rows above: the best of each run"


def _mean(every: list[Place]) -> float:
    return statistics.fmean(place.regret() for place in every)


def _worst(every: list[Place]) -> float:
    return max(place.regret() for place in every)


def show(every: list[Place]) -> None:
    """Print the attainment of every rule, with 95 % confidence, and where price loses."""
    table = Table(title="SLO attainment, mean and half width of its 95 % interval; * where price is behind the best")
    rules = list(every[0].found)
    for column in ("cell", *rules):
        table.add_column(column, justify="left" if column == "cell" else "right")
    for place in every:
        if place.found:
            figures = [interval(place.found[rule]) for rule in rules]
            mark = " *" if place.regret() > 0 else ""
            table.add_row(str(place) + mark, *(f"{mean:.3f}\n±{half:.3f}" for mean, half in figures))
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table)
