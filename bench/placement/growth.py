"""How the time of a full plan grows with the cluster, as a plot: points beside n log n, on logarithmic axes.

``make placement-growth`` measures and writes ``docs/placement-growth.svg``; its figures are CPU seconds of one core of
the machine that drew it.
"""

from __future__ import annotations

import math
import platform
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from bench.placement.cases import Case, large
from twinpool.operator.logic.placement.place import place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES = (1250, 1768, 2500, 3536, 5000, 7071, 10000)
#: Plans of one size; the shortest counts, since nothing makes a computation shorter by accident.
_RUNS = 3
_TARGET = Path(__file__).parents[2] / "docs" / "placement-growth.svg"
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 440, 70, 20, 50, 60
_COLOURS = ("#1f77b4", "#d95f02")


@dataclass(frozen=True)
class Series:
    """CPU seconds by number of nodes."""

    name: str
    points: tuple[tuple[int, float], ...]


@cache
def scaled(nodes: int, pools: int) -> Case:
    """Return a cluster of that many nodes with pools of 1P:3D, and two groups of 32 GPUs for each 25 pools."""
    return large(Random(1), nodes, pools=pools, gangs=pools * 2 // 25)


def full(nodes: int, pools: int) -> float:
    """Return the CPU seconds of a plan from scratch."""
    question = scaled(nodes, pools)
    began = time.process_time()
    place(question.groups, question.nodes, {}, question.topology, question.constraints)
    return time.process_time() - began


def measured(sizes: Sequence[int], timed: Callable[[int, int], float] = full) -> list[Series]:
    """Return the growth with the same groups, and with groups in proportion to the nodes."""

    def shortest(size: int, pools: int) -> float:
        return min(timed(size, pools) for _ in range(_RUNS))

    return [
        Series("50 pools, 4 groups of 32 GPUs", tuple((size, shortest(size, 50)) for size in sizes)),
        Series("one pool for 25 nodes", tuple((size, shortest(size, size // 25)) for size in sizes)),
    ]


def n_log_n(size: int, first: tuple[int, float]) -> float:
    """Return what n log n through a first point comes to at ``size`` nodes."""
    return first[1] * size * math.log(size) / (first[0] * math.log(first[0]))


@dataclass(frozen=True)
class Axes:
    """Logarithmic axes over these sizes and seconds; the seconds span whole powers of ten."""

    sizes: tuple[int, ...]
    low: float
    high: float

    def across(self, size: float) -> float:
        """Return where a number of nodes is."""
        first, last = min(self.sizes), max(self.sizes)
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log(size / first) / math.log(last / first)

    def down(self, value: float) -> float:
        """Return where a number of seconds is."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    def drawn(self) -> list[str]:
        """Return the grid and its labels."""
        decades = round(math.log10(self.high / self.low))
        parts = []
        for value in (self.low * 10**step for step in range(decades + 1)):
            parts.append(_line([(_LEFT, self.down(value)), (_WIDTH - _RIGHT, self.down(value))], "#ddd"))
            parts.append(_text(_LEFT - 8, self.down(value) + 4, f"{value:g}", 11, "end"))
        foot = _HEIGHT - _BOTTOM + 18
        return parts + [_text(self.across(size), foot, f"{size:,}", 11, "middle") for size in self.sizes]


def svg(series: Sequence[Series], machine: str) -> str:
    """Return the plot; dashed lines are n log n through each first point."""
    values = [value for one in series for _, value in one.points]
    values += [n_log_n(one.points[-1][0], one.points[0]) for one in series]
    sizes = tuple(sorted({size for one in series for size, _ in one.points}))
    axes = Axes(sizes, 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values))))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">'
    parts = [
        head,
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, "A full plan from scratch: CPU seconds of one core by nodes", 15),
        _text(_LEFT, 38, f"{machine}; shortest of {_RUNS} runs; dashed: n log n through the first point", 11),
        *axes.drawn(),
        *(part for index, one in enumerate(series) for part in _drawn(one, axes, index)),
    ]
    return "\n".join([*parts, "</svg>", ""])


def _drawn(one: Series, axes: Axes, index: int) -> list[str]:
    colour = _COLOURS[index]
    points = [(axes.across(size), axes.down(value)) for size, value in one.points]
    dashed = [(axes.across(size), axes.down(n_log_n(size, one.points[0]))) for size, _ in one.points]
    size, value = one.points[-1]
    share = value / n_log_n(size, one.points[0])
    legend = f"{one.name}: {value:.2f} s at {size:,} nodes, {share:.2f} of n log n"
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in points]
    words = _text(_LEFT + 330 * index, _HEIGHT - 14, legend, 11, colour=colour)
    return [_line(points, colour), _line(dashed, colour, "6 4"), *dots, words]


def _text(x: float, y: float, words: str, size: int, anchor: str = "start", colour: str = "#222") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{words}</text>'


def _line(points: Sequence[tuple[float, float]], colour: str, dashes: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{style}/>'


def main() -> None:
    """Measure, and write the plot."""
    found = measured(SIZES)
    _TARGET.write_text(svg(found, f"Python {platform.python_version()}, {platform.machine()}"))
    for one in found:
        print(one.name, " ".join(f"{size}:{value:.3f}" for size, value in one.points))


if __name__ == "__main__":
    main()
