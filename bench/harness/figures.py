"""From samples to figures: medians, paired ratios and their spread. Pure.

The ratio is the median of the *paired* ratios, not the ratio of the medians: on a shared machine the load drifts
between runs, and two samples taken side by side drift together.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.harness.cell import Bar, Cell, Pair


@dataclass(frozen=True, slots=True)
class Figures:
    """One finished row. ``spread`` is (least, greatest) of the ratio, or of ours when nothing stands beside."""

    what: str
    unit: str
    ours: float
    beside: float | None
    ratio: float | None
    spread: tuple[float, float]
    bar: Bar | None
    pairs: tuple[Pair, ...]
    note: str = ""

    @property
    def missed(self) -> bool:
        """Return whether the row has a bar and does not clear it."""
        if self.bar is None:
            return False
        value = self.ratio if self.bar.figure == "ratio" else self.ours
        return value is None or not self.bar.clears(value)

    def to_json(self) -> dict[str, Any]:
        """Return the row for the JSON report."""
        return {
            "what": self.what,
            "unit": self.unit,
            "ours": self.ours,
            "beside": self.beside,
            "ratio": self.ratio,
            "spread": list(self.spread),
            "bar": None if self.bar is None else str(self.bar),
            "missed": self.missed,
            "runs": len(self.pairs),
            "samples": [{"ours": pair.ours, "beside": pair.beside} for pair in self.pairs],
            "note": self.note,
        }


def figures(cell: Cell, pairs: Sequence[Pair]) -> Figures:
    """Return the row of ``cell`` from its runs.

    Raises
    ------
    ValueError
        When there is no run at all: a row without a sample would be an invented one.
    """
    if not pairs:
        raise ValueError(f"cell {cell.what!r} has no run")
    ours = [pair.ours for pair in pairs]
    beside = [pair.beside for pair in pairs if pair.beside is not None]
    ratios = [pair.ours / pair.beside for pair in pairs if pair.beside]
    spread = ratios or ours
    return Figures(
        what=cell.what,
        unit=cell.unit,
        ours=statistics.median(ours),
        beside=statistics.median(beside) if beside else None,
        ratio=statistics.median(ratios) if ratios else None,
        spread=(min(spread), max(spread)),
        bar=cell.bar,
        pairs=tuple(pairs),
        note=cell.note,
    )
