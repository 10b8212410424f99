"""How commands print: tables for people on a terminal, aligned plain text in a pipe, JSON or YAML for programs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence


#: Words that stand out on a terminal, by colour.
_COLOURS = {"ok": "green", "True": "green", "serving": "green", "failed": "red", "False": "red", "unknown": "yellow"}


def write_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write rows below headers to standard output; columns are as wide as their widest cell."""
    if sys.stdout.isatty():
        table = Table(*headers, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*(f"[{_COLOURS[cell]}]{cell}" if cell in _COLOURS else _plain(cell) for cell in row))
        Console(highlight=False).print(table)
        return
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        sys.stdout.write(
            "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n"
        )


def _plain(cell: str) -> str:
    return cell.replace("[", r"\[")


def value_text(value: Any, output: str) -> str:
    """Return a value as ``json`` (one line) or ``yaml``, which say the same in the same types."""
    line = json.dumps(value)
    text: str = yaml.safe_dump(json.loads(line), sort_keys=False, width=120)
    return line + "\n" if output == "json" else text


def write_value(value: Any, output: str) -> None:
    """Write a value as ``json`` (one line) or ``yaml`` to standard output."""
    sys.stdout.write(value_text(value, output))
