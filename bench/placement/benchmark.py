"""Placement: speed on a large cluster, the objective beside an exact solver, and its figures beside other rules."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import cache
from random import Random
from typing import TYPE_CHECKING

from bench.harness.cell import Bar, Cell
from bench.placement.baselines import RULES
from bench.placement.compare import Comparison, compared
from bench.placement.growth import full, scaled
from bench.placement.quality import Quality, case, ours, quality
from twinpool.operator.logic.placement.place import place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TITLE = "placement: speed and quality"

_SIZES = (1250, 2500, 5000, 10000)
_ALONE = "CPU seconds of one core; what is measured does nothing but compute."
_SOLVER = (
    "exact: HiGHS on random cases of at most 12 nodes; the gap is the objective above the optimum, as a share of it. "
    "Disagreements: a group refused that fits, a hard rule broken, or the two objectives differing."
)
_RULES = (
    "beside: that rule, as we read its publication, on the same cluster; figures are computed from the placement and "
    "the assumed link speeds of the topology, nothing is measured on a network."
)


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Give the cells; nothing runs beside this process but one that tells its memory."""
    yield [*_speed(quick), *_exact(25 if quick else 500), *_beside(1000 if quick else 4000, 1 if quick else 3)]


def _speed(quick: bool) -> list[Cell]:
    what = "5,000 nodes, 200 pools of 1P:3D and 16 groups of 32 GPUs"
    sizes = _SIZES[:-1] if quick else _SIZES
    both = [
        Cell(f"{size:,} nodes, {what}", "s CPU", lambda size=size, pools=pools: full(size, pools))  # type: ignore[misc]
        for size in sizes
        for what, pools in (("50 pools, 4 groups of 32 GPUs", 50), ("pools and groups in proportion", size // 25))
    ]
    growth = f"growth from {sizes[0]:,} to {sizes[-1]:,} nodes, the same groups, beside n log n"
    return [
        Cell(f"{what}: from scratch", "s CPU", lambda: full(5000, 200), bar=Bar("ours", at_most=5.0), note=_ALONE),
        Cell("... one changed pool", "s CPU", _one_pool, bar=Bar("ours", at_most=0.1)),
        Cell("... peak memory", "MiB", _memory, bar=Bar("ours", at_most=300.0)),
        *both,
        Cell(growth, "times", lambda: _growth(sizes), lambda: _n_log_n(sizes), bar=Bar("ratio", at_most=1.0)),
    ]


def _growth(sizes: tuple[int, ...]) -> float:
    return full(sizes[-1], 50) / full(sizes[0], 50)


def _n_log_n(sizes: tuple[int, ...]) -> float:
    return sizes[-1] * math.log(sizes[-1]) / (sizes[0] * math.log(sizes[0]))


@cache
def _settled() -> dict[str, tuple[str, ...]]:
    question = scaled(5000, 200)
    return dict(place(question.groups, question.nodes, {}, question.topology, question.constraints).places)


def _one_pool() -> float:
    """Return what it costs to place one pool anew while all others stay."""
    question = scaled(5000, 200)
    others = {name: nodes for name, nodes in _settled().items() if not name.startswith("p7-")}
    began = time.process_time()
    place(question.groups, question.nodes, others, question.topology, question.constraints)
    return time.process_time() - began


def _memory() -> float:
    command = [sys.executable, "-m", "bench.placement.footprint"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _exact(count: int) -> list[Cell]:
    @cache
    def found() -> list[Comparison]:
        return compared(range(count))

    def wrong() -> float:
        told = [f"case {item.seed}: {text}" for item in found() for text in item.wrong]
        for line in told:
            print(line, file=sys.stderr)
        return float(len(told))

    what = f"{count} cases beside the exact solver"
    return [
        Cell(f"{what}: disagreements", "cases", wrong, bar=Bar("ours", at_most=0.0), note=_SOLVER),
        Cell("... groups refused, all rightly", "groups", lambda: float(sum(item.shortfalls for item in found()))),
        Cell("... mean gap", "%", lambda: 100 * statistics.fmean(x.gap for x in found()), bar=Bar("ours", at_most=3.0)),
        Cell("... worst gap", "%", lambda: 100 * max(x.gap for x in found()), bar=Bar("ours", at_most=10.0)),
    ]


def _beside(nodes: int, seeds: int) -> list[Cell]:
    @cache
    def figures(rule: str) -> list[Quality]:
        by_name = {**RULES, "ours": ours}
        return [quality(case(Random(seed), nodes), by_name[rule], Random(seed)) for seed in range(seeds)]

    result: list[Cell] = []
    for rule in RULES:
        for what, unit, value in _FIGURES:
            bar = Bar("ratio", at_most=1.0) if what == "objective" else None
            mine, theirs = _mean(figures, "ours", value), _mean(figures, rule, value)
            result.append(Cell(f"{nodes:,} nodes, {rule}: {what}", unit, mine, theirs, bar=bar, note=_RULES))

        def dominated(rule: str = rule) -> float:
            return float(sum(b.beats(a) for a, b in zip(figures("ours"), figures(rule), strict=True)))

        result.append(
            Cell(f"... {rule}: at least as good in all of these", "cases", dominated, bar=Bar("ours", at_most=0.0))
        )
    return result


_FIGURES: tuple[tuple[str, str, Callable[[Quality], float]], ...] = (
    ("objective", "GPUs", lambda found: found.objective),
    ("groups placed", "groups", lambda found: found.placed),
    ("mean pair bandwidth", "GB/s", lambda found: found.bandwidth / 1e9),
    ("KV that leaves its block", "%", lambda found: 100 * found.crossing),
    ("role in its fullest rack", "%", lambda found: 100 * found.exposed),
    ("stranded GPUs", "GPUs", lambda found: found.stranded),
    ("later groups of 32 GPUs", "groups", lambda found: found.later),
)


def _mean(figures: Callable[[str], list[Quality]], rule: str, value: Callable[[Quality], float]) -> Callable[[], float]:
    return lambda: statistics.fmean(value(found) for found in figures(rule))
