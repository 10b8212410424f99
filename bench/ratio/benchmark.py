"""How many requests a second 1:3, 2:2 and 3:1 prefill and decode groups serve within objectives. Simulated.

Four GPUs, one for each group, on three workloads that want three ratios. Each run draws other requests. The rate is the
greatest at which 99 % of the requests keep both objectives (goodput). Beside stands the best of all pairs, ours is the
pair that the production planner picks for four GPUs: the one it is content with up to the highest rate. The bar was set
before looking: 0.95 of the best pair.
"""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.harness.cell import Bar, Cell
from bench.ratio.workloads import KINDS, Kind, requests
from twinpool.core.economics import prices_of
from twinpool.core.kv import SHAPES
from twinpool.core.timing import ACCELERATORS
from twinpool.operator.logic.scaling import Limits
from twinpool.operator.logic.scaling_need import Group, Promise
from twinpool.simulate.capacity import greatest, greatest_rate
from twinpool.simulate.pool import Setup
from twinpool.simulate.scores import interval
from twinpool.simulate.whatif import demand, planned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twinpool.operator.logic.scaling_need import Demand

TITLE = "ratio: requests/s within objectives of 1:3, 2:2 and 3:1 on four GPUs (simulated)"

GPUS = 4
PAIRS = ((1, 3), (2, 2), (3, 1))
PRICES = prices_of(SHAPES["llama-3-8b"], ACCELERATORS["h100"])
PROMISE = Promise(ttft=1.0, itl=0.04, miss=0.01)
#: KV tokens of one group: what an H100 has left beside the weights of an 8B model.
ROOM = 400_000
#: Sequences of one group: KV room binds, as in the simulator.
_SEQUENCES = 4096
_SETUP = Setup(PRICES, 1, 1, ROOM, ROOM, rule="price", ttft=PROMISE.ttft, both_links=True)
#: Lower seeds were used while this was written.
_FIRST_SEED = 100
_NOTE = "simulated: Llama-3-8B on four H100, times from data sheets; ours: the planner's pair, beside: the best pair"


@dataclass
class Place:
    """One workload, and what each pair served in each run so far: both samples of a run are of the same requests."""

    kind: Kind
    requests: int
    #: By pair and by whether decode groups may prefill: requests/s of each run.
    found: dict[tuple[tuple[int, int], bool], list[float]] = field(default_factory=dict)
    chosen: list[tuple[int, int]] = field(default_factory=list)
    foreseen: list[float] = field(default_factory=list)
    #: Runs that the planner's pair and the best one were asked for.
    _asked: list[int] = field(default_factory=lambda: [0, 0])

    def planned(self) -> float:
        """Return what the planner's pair served in the next run."""
        self._asked[0] += 1
        number = self._asked[0]
        self._upto(number)
        return self.found[self.chosen[number - 1], False][number - 1]

    def best(self) -> float:
        """Return what the best pair served in the next run."""
        self._asked[1] += 1
        number = self._asked[1]
        self._upto(number)
        return max(self.found[pair, False][number - 1] for pair in PAIRS)

    def _upto(self, runs: int) -> None:
        """Draw other requests and let every pair serve them, until there were so many runs."""
        while len(self.chosen) < runs:
            trace = requests(self.kind, self.requests, _FIRST_SEED + len(self.chosen))
            rate = len(trace) / trace[-1].arrival
            for conditional in (False, True):
                for pair in PAIRS:
                    setup = replace(_SETUP, prefill=pair[0], decode=pair[1], conditional=conditional)
                    served = rate * greatest_rate(trace, setup, PROMISE)
                    self.found.setdefault((pair, conditional), []).append(served)
            pair, most = foretold(demand(trace, PRICES, 0))
            self.chosen.append(pair)
            self.foreseen.append(most)


def foretold(work: Demand) -> tuple[tuple[int, int], float]:
    """Return the planner's pair for all GPUs, and the greatest rate at which it thinks that enough."""
    limits = Limits((1, GPUS), (1, GPUS), budget=GPUS)

    def enough(factor: float) -> bool:
        return planned(work.times(factor), PRICES, PROMISE, Group(ROOM, _SEQUENCES), limits).enough

    most = greatest(enough)
    decision = planned(work.times(most), PRICES, PROMISE, Group(ROOM, _SEQUENCES), limits)
    rest = GPUS - decision.prefill - decision.decode
    # A GPU that it would leave free decodes.
    return (decision.prefill, decision.decode + rest), most * work.rate


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Give a cell for each workload; print what every pair served."""
    places = [Place(kind, kind.requests // 5 if quick else kind.requests) for kind in KINDS]
    yield [
        Cell(place.kind.name, "requests/s", place.planned, place.best, Bar("ratio", at_least=0.95), _NOTE)
        for place in places
    ]
    _show(places)


def _show(places: Sequence[Place]) -> None:
    table = Table(
        title="requests/s within objectives; in brackets with decode groups that prefill where that is cheaper"
    )
    for column in (
        "workload",
        "runs",
        *(f"{prefill}:{decode}" for prefill, decode in PAIRS),
        "planner: pair, foretold",
    ):
        table.add_column(column, justify="left" if column == "workload" else "right")
    for place in places:
        if place.chosen:
            pairs = ", ".join(f"{prefill}:{decode}" for prefill, decode in dict.fromkeys(place.chosen))
            served = [_words(place, pair) for pair in PAIRS]
            foreseen = f"{pairs}, {statistics.fmean(place.foreseen):.1f}"
            table.add_row(place.kind.name, str(len(place.chosen)), *served, foreseen)
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print(table)


def _words(place: Place, pair: tuple[int, int]) -> str:
    mean, half = interval(place.found[pair, False])
    return f"{mean:.1f} ±{half:.1f} ({statistics.fmean(place.found[pair, True]):.1f})"
