"""The vocabulary of a benchmark: cells, bars and samples. Pure.

A *cell* is one row of the table: a thing of ours, the thing it stands beside, and the bar that it must clear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

#: Takes one sample: does the work once and returns the value in the cell's unit.
Sampler = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Bar:
    """What a cell must reach: ``figure`` (ours alone, or ours divided by beside) within the given limits."""

    figure: Literal["ratio", "ours"]
    at_most: float | None = None
    at_least: float | None = None

    def __str__(self) -> str:
        """Return the bar as the table shows it, such as ``ratio <= 1.5``."""
        limits = [f"<= {self.at_most:g}"] if self.at_most is not None else []
        limits += [f">= {self.at_least:g}"] if self.at_least is not None else []
        return f"{self.figure} {' and '.join(limits)}"

    def clears(self, value: float) -> bool:
        """Return whether ``value`` is within the limits; a limit itself still clears."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of a benchmark.

    Parameters
    ----------
    what:
        The row's name: what is measured, under which load.
    unit:
        Unit of the samples, such as ``s CPU / 1k tokens``.
    ours, beside:
        Take one sample each. ``beside`` is None when there is nothing to stand beside; ``note`` then says why.
    bar:
        None when the figure only informs.
    note:
        Printed under the table: what ``beside`` is, what was left out, what the reader must know.
    """

    what: str
    unit: str
    ours: Sampler
    beside: Sampler | None = None
    bar: Bar | None = None
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse a bar on a ratio that can never exist."""
        if self.bar is not None and self.bar.figure == "ratio" and self.beside is None:
            raise ValueError(f"cell {self.what!r} has a bar on the ratio but nothing beside it")


@dataclass(frozen=True, slots=True)
class Pair:
    """Samples of one run, taken one directly after the other so that both saw the same machine."""

    ours: float
    beside: float | None = None
