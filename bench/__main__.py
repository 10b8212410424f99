"""``python -m bench NAME [--quick] [--out FILE]``: run one benchmark and say whether it cleared its bars."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bench.harness import registry, report, runner
from twinpool.core.errors import TwinpoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.harness.cell import Cell

CLEARED, MISSED, FAILED = 0, 1, 2

#: Columns of the table when no terminal says how many it has.
_WIDTH = 140


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 when every bar was cleared, 1 when one was missed, 2 when nothing could be measured."""
    arguments = _parser().parse_args(argv)
    problems = Console(stderr=True, soft_wrap=True)
    try:
        return _run(arguments.name, arguments.quick, arguments.out, problems)
    except TwinpoolError as error:
        problems.print(f"bench: {error}", style="red", markup=False)
        return FAILED
    except KeyboardInterrupt:
        problems.print("bench: interrupted, nothing was written")
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description="Measure a part of Twinpool beside something else.")
    parser.add_argument("name", help=f"one of: {', '.join(registry.names())}")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs; ends within 50 s")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures as JSON")
    return parser


def _run(name: str, quick: bool, out: Path | None, progress: Console) -> int:
    benchmark = registry.load(name)
    start = time.monotonic()
    runs, budget = (runner.QUICK_RUNS, runner.QUICK_BUDGET) if quick else (runner.FULL_RUNS, runner.FULL_BUDGET)
    with benchmark.cells(quick) as cells, progress.status("starting") as status:

        def on_run(cell: Cell, run: int, wanted: int) -> None:
            status.update(f"{time.monotonic() - start:3.0f} s, run {run} of {wanted}: {cell.what}")
            if not progress.is_terminal:
                progress.print(f"{time.monotonic() - start:3.0f} s, run {run} of {wanted}: {cell.what}", markup=False)

        rows = runner.measure(cells, runs=runs, budget=budget, on_run=on_run)
    seconds = time.monotonic() - start
    shown = Console()
    if not shown.is_terminal:
        shown.width = _WIDTH
    report.show(shown, f"{benchmark.TITLE} ({'quick, ' if quick else ''}{seconds:.0f} s)", rows)
    if out is not None:
        _write(out, json.dumps(report.document(name, quick, seconds, rows), indent=2) + "\n")
    return MISSED if any(row.missed for row in rows) else CLEARED


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text)
    except OSError as error:
        raise TwinpoolError(
            f"cannot write {out}: {error.strerror}", "give --out a file in a folder that exists"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
