"""A dashboard as one SVG, drawn from what Prometheus answered: to look at it where Grafana does not run. Pure.

Always true: a panel without data says so in words; every line has a colour that people with colour blindness can tell
apart (Okabe and Ito's eight) and a name with its last value.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from monitoring.panel import Dashboard, Panel, Unit

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#B8A800")
#: The first one is too dark on dark panels.
_BRIGHT = {"#0072B2": "#4C9BE8"}
#: Two panels, gaps and a scroll bar are as wide as a laptop's window: 1280.
_WIDTH, _PLOT, _LINE, _GAP, _AXIS, _HEAD = 608, 150, 17, 16, 62, 34
#: Names that a panel lists; more would hide the picture.
NAMES = 8
DASHES = ' stroke-dasharray="5 4"'
_STEPS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True)
class Theme:
    """Colours of paper, panels, lines and text."""

    paper: str
    panel: str
    grid: str
    text: str
    dim: str
    bright: bool = False

    def colour(self, number: int) -> str:
        """Return the colour of a panel's series, by its number."""
        plain = COLOURS[number % len(COLOURS)]
        return _BRIGHT.get(plain, plain) if self.bright else plain


LIGHT = Theme("#f4f5f5", "#ffffff", "#e2e4e7", "#24292e", "#5b6470")
DARK = Theme("#111217", "#1c1e24", "#33363d", "#e3e5e8", "#a3aab5", bright=True)


@dataclass(frozen=True)
class Line:
    """One series: its name, and its values by time in seconds."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False

    @property
    def last(self) -> float:
        """Return the newest value that is a number."""
        return next((value for _, value in reversed(self.points) if math.isfinite(value)), math.nan)


def draw(board: Dashboard, lines: Mapping[str, Sequence[Line]], theme: Theme, remark: str = "") -> str:
    """Return the SVG of a dashboard; ``lines`` are by panel title, ``remark`` stands beside the dashboard's title."""
    parts, top = [], 44.0
    for title, panels in board.rows:
        parts.append(_text(_GAP, top + 16, title, theme.dim, 13, bold=True))
        top += 26
        for left in range(0, len(panels), 2):
            pair = panels[left : left + 2]
            height = max(_height(panel, lines.get(panel.title, ())) for panel in pair)
            for column, panel in enumerate(pair):
                x = _GAP + column * (_WIDTH + _GAP)
                parts.append(_panel(panel, lines.get(panel.title, ()), x, top, height, theme))
            top += height + _GAP
    width = 2 * _WIDTH + 3 * _GAP
    head = _text(_GAP, 28, board.title, theme.text, 18, bold=True) + _text(
        width - _GAP, 28, remark, theme.dim, 12, "end"
    )
    size = f'width="{width}" height="{top:.0f}" viewBox="0 0 {width} {top:.0f}"'
    paper = f'<rect width="{width}" height="{top:.0f}" fill="{theme.paper}"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{paper}{head}{"".join(parts)}</svg>\n'


def _height(panel: Panel, lines: Sequence[Line]) -> float:
    names = min(len(lines), NAMES + 1)
    return _HEAD + (0 if panel.kind == "table" else _PLOT + 26) + max(names, 1) * _LINE + 10


def _panel(panel: Panel, lines: Sequence[Line], x: float, y: float, height: float, theme: Theme) -> str:
    frame = (
        f'<rect x="{x}" y="{y:.0f}" width="{_WIDTH}" height="{height:.0f}" rx="4" fill="{theme.panel}" '
        f'stroke="{theme.grid}"/>'
    )
    made = [frame, _text(x + 12, y + 22, panel.title, theme.text, 14, bold=True)]
    below = y + _HEAD
    if panel.kind == "timeseries" and lines:
        made.append(_plot(lines, panel.unit, x + _AXIS, below + 6, _WIDTH - _AXIS - 16, _PLOT, theme))
    if panel.kind == "timeseries":
        below += _PLOT + 26
    if not lines:
        made.append(_text(x + 12, below + 12, f"no data: {panel.empty}" if panel.empty else "no data", theme.dim, 12))
    shown = sorted(lines, key=lambda line: line.last if math.isfinite(line.last) else -math.inf, reverse=True)[:NAMES]
    order = [line for line in lines if line in shown]
    for number, line in enumerate(order):
        middle = below + 8 + number * _LINE
        value = "" if panel.kind == "table" else f"  {words(line.last, panel.unit)}"
        left = x + 12
        if panel.kind == "timeseries":
            style = f'stroke="{theme.colour(lines.index(line))}" stroke-width="4"{DASHES if line.dashed else ""}'
            made.append(f'<path d="M{left} {middle + 2:.0f}h14" {style}/>')
            left += 20
        made.append(_text(left, middle + 6, _short(line.name) + value, theme.text, 12))
    if len(lines) > len(order):
        rest = f"and {len(lines) - len(order)} more"
        made.append(_text(x + 30, below + 14 + len(order) * _LINE, rest, theme.dim, 12))
    return "".join(made)


def _plot(lines: Sequence[Line], unit: Unit, x: float, y: float, width: float, height: float, theme: Theme) -> str:
    times = [at for line in lines for at, _ in line.points]
    begin, end = min(times), max(max(times), min(times) + 1)
    ticks = scale(max((value for line in lines for _, value in line.points if math.isfinite(value)), default=0.0))
    made = []
    for tick in ticks:
        at = y + height * (1 - tick / ticks[-1])
        made.append(f'<path d="M{x} {at:.1f}h{width}" stroke="{theme.grid}"/>')
        made.append(_text(x - 6, at + 4, words(tick, unit), theme.dim, 11, "end"))
    for seconds in (begin, end):
        anchor = "start" if seconds == begin else "end"
        at = x + width * (seconds - begin) / (end - begin)
        made.append(
            _text(at, y + height + 14, f"{seconds - end:.0f} s" if seconds < end else "now", theme.dim, 11, anchor)
        )
    for number, line in enumerate(lines):
        for run in runs(line.points):
            where = [
                f"{x + width * (at - begin) / (end - begin):.1f} {y + height * (1 - max(value, 0) / ticks[-1]):.1f}"
                for at, value in run
            ]
            path = "M" + "L".join(where) + ("h2" if len(run) == 1 else "")
            style = f'fill="none" stroke="{theme.colour(number)}" stroke-width="2" stroke-linejoin="round"'
            made.append(f'<path d="{path}" {style}{DASHES if line.dashed else ""}/>')
    return "".join(made)


def runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Return the points in pieces without gaps: a value that is no number, or a time twice as far as usual."""
    usual = min((b - a for (a, _), (b, _) in pairwise(points)), default=0.0)
    found: list[list[tuple[float, float]]] = [[]]
    before = points[0][0] if points else 0.0
    for at, value in points:
        if found[-1] and (not math.isfinite(value) or at - before > 2 * usual):
            found.append([])
        if math.isfinite(value):
            found[-1].append((at, value))
        before = at
    return [piece for piece in found if piece]


def named(legend: str, labels: Mapping[str, str]) -> str:
    """Return the name of a series: the legend with ``{{label}}`` filled in."""
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), legend).strip()


def scale(highest: float) -> list[float]:
    """Return the ticks of an axis from 0 to at least ``highest``: four or five round steps."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [step * number for number in range(math.ceil(highest / step - 1e-9) + 1)]


def words(value: float, unit: Unit) -> str:
    """Return a value with its unit, short."""
    if not math.isfinite(value):
        return "-"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if 0 < abs(value) < 1 else f"{value:.4g} s"
    suffix = {"Bps": "B/s", "bytes": "B", "reqps": "/s", "ops": "/s"}.get(unit, "")
    for letter, size in reversed(_STEPS.items()):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}{suffix}"
    return f"{value:.3g} {suffix}".strip() if suffix.startswith("B") else f"{value:.3g}{suffix}"


def _short(text: str) -> str:
    return text if len(text) <= 72 else f"{text[:71]}…"


def _text(x: float, y: float, text: str, colour: str, size: int, anchor: str = "start", *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    family = "font-family=\"Inter, 'DejaVu Sans', Arial, sans-serif\""
    place = f'x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" {family}{weight}>{escape(text)}</text>'
