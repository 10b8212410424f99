"""Shows what was measured: a table for people, JSON for machines."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from bench.harness.figures import Figures


def machine() -> dict[str, Any]:
    """Return the facts without which a figure cannot be judged."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def number(value: float | None) -> str:
    """Return ``value`` with three significant digits, or a dash when there is none."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(title: str, rows: Sequence[Figures]) -> Table:
    """Return the table of the finished rows."""
    result = Table(title=title, title_justify="left")
    for column in ("what", "unit", "ours", "beside", "ratio", "bar", "spread", "runs"):
        result.add_column(column, justify="left" if column in ("what", "unit", "bar") else "right")
    for row in rows:
        bar = "-" if row.bar is None else f"{row.bar} {'MISSED' if row.missed else 'ok'}"
        spread = f"{number(row.spread[0])} - {number(row.spread[1])}"
        figures = (number(row.ours), number(row.beside), number(row.ratio))
        style = "red" if row.missed else None
        result.add_row(row.what, row.unit, *figures, bar, spread, str(len(row.pairs)), style=style)
    return result


def show(console: Console, title: str, rows: Sequence[Figures]) -> None:
    """Print the table, then the notes."""
    console.print(table(title, rows))
    for note in dict.fromkeys(row.note for row in rows if row.note):
        console.print(f"[dim]{note}[/dim]")


def document(name: str, quick: bool, seconds: float, rows: Sequence[Figures]) -> dict[str, Any]:
    """Return the JSON report."""
    return {
        "benchmark": name,
        "quick": quick,
        "seconds": round(seconds, 1),
        "machine": machine(),
        "cells": [row.to_json() for row in rows],
        "missed": [row.what for row in rows if row.missed],
    }
