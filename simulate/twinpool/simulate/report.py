"""A page that shows what runs of a trace came to: one file, nothing loaded from elsewhere, light and dark. Pure.

Always true: every figure in it is also in the table, so nothing depends on seeing a plot.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from twinpool.simulate.whatif import Moment, Outcome

#: Size of a plot and of its margins (left, top, right, bottom), in its own units.
_WIDTH, _HEIGHT = 720, 260
_LEFT, _TOP, _RIGHT, _BOTTOM = 56, 14, 16, 40
#: Steps between two lines of a plot, times a power of ten.
_STEPS = (1, 2, 3, 4, 5, 6, 8, 10)
#: Most runs whose course is drawn.
_COURSES = 6
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --faint: #59636e; --line: #d0d7de;
  --first: #0757b5; --second: #b4470b; --third: #1a7f37; }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --faint: #9198a1; --line: #3d444d;
  --first: #6cb0ff; --second: #ffa657; --third: #56d364; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } p, figcaption { color: var(--faint); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } figure { margin: 1rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .7rem; text-align: right; }
th:nth-child(3), td:nth-child(3) { text-align: left; }
svg { height: auto; max-width: 100%; } svg text { fill: var(--text); font: 12px system-ui, sans-serif; }
.axis { stroke: var(--line); } .first { stroke: var(--first); } .second { stroke: var(--second); }
.third { stroke: var(--third); } .line { fill: none; stroke-width: 2; } .dash { stroke-dasharray: 6 4; }
.dot { fill: var(--first); } .out { fill: var(--back); stroke: var(--faint); stroke-width: 1.5; }
"""


def page(title: str, words: str, outcomes: Sequence[Outcome]) -> str:
    """Return the whole page; ``words`` is what the planner says."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        "<p>In virtual time: seconds are the model's, and nothing here was measured.</p>",
        f"<p>Planner: {escape(words)}</p>",
        "<h2>Runs</h2>",
        _table(outcomes),
        "<h2>Objectives kept for GPU hours</h2>",
        _pareto(outcomes),
        "<h2>Over time</h2>",
        *(_course(number, item) for number, item in enumerate(outcomes[:_COURSES], 1)),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _table(outcomes: Iterable[Outcome]) -> str:
    names = ("run", "rate", "rule", "P:D", "attained", "TTFT mean", "TTFT p99", "ITL p99", "cached", "GPU hours")
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(n, o))}</tr>" for n, o in enumerate(outcomes, 1)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cells(number: int, item: Outcome) -> tuple[str, ...]:
    variant, score = item.variant, item.score
    return (
        str(number), f"{variant.rate:g}", escape(variant.rule), numbers(item),
        f"{score.attainment:.1%}", f"{score.ttft_mean:.3f} s", f"{score.ttft_p99:.3f} s",
        f"{1000 * score.itl_p99:.1f} ms", f"{score.hit:.1%}", f"{item.gpu_hours:.2f}",
    )  # fmt: skip


def numbers(item: Outcome) -> str:
    """Return the numbers of prefill and decode groups in words; where they follow the work, the least and the most."""
    variant = item.variant
    if not variant.scaled:
        return f"{variant.prefill}:{variant.decode}"
    roles = [[pair[role] for _, pair in item.groups] for role in (0, 1)]
    return ":".join(f"{min(counts)}-{max(counts)}" for counts in roles)


def frontier(outcomes: Sequence[Outcome]) -> list[int]:
    """Return the places of the runs of which none has more requests within objectives for as few GPU hours."""
    best, found = -1.0, []
    for place in sorted(range(len(outcomes)), key=lambda i: (outcomes[i].gpu_hours, -outcomes[i].score.attainment)):
        if outcomes[place].score.attainment > best:
            best = outcomes[place].score.attainment
            found.append(place)
    return found


def _pareto(outcomes: Sequence[Outcome]) -> str:
    most = round_end(max([item.gpu_hours for item in outcomes], default=0.0) or 1.0)
    across, up = _scales(most, 1.0)
    best = frontier(outcomes)
    places = [(across(item.gpu_hours), up(item.score.attainment)) for item in outcomes]
    dots = "".join(
        f'<circle class="{"dot" if number in best else "out"}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        f'<text x="{x + 8:.1f}" y="{y + 14:.1f}">{number + 1}</text>'
        for number, (x, y) in enumerate(places)
    )
    line = " ".join(f"{places[place][0]:.1f},{places[place][1]:.1f}" for place in best)
    drawn = f'{_axes(most, 1.0, "GPU hours", share=True)}<polyline class="first line" points="{line}"/>{dots}'
    words = (
        "Filled: no other run keeps objectives for more requests with as few GPU hours. Numbers are those of the table."
    )
    return _figure("Share of requests within both objectives over GPU hours, a point for each run", drawn, words)


def _course(number: int, item: Outcome) -> str:
    variant, moments = item.variant, item.moments
    long = round_end(max([moment.at for moment in moments], default=0.0) or 1.0)
    groups = max([variant.prefill, variant.decode, *(max(pair) for _, pair in item.groups)])
    high = round_end(max([groups, *(max(moment.waiting, moment.writing) for moment in moments)]))
    across, up = _scales(long, high)

    def line(name: str, value: Callable[[Moment], float]) -> str:
        points = " ".join(f"{across(moment.at):.1f},{up(value(moment)):.1f}" for moment in moments)
        return f'<polyline class="{name} line" points="{points}"/>'

    def steps(name: str, role: int) -> str:
        points, last = [], (variant.prefill, variant.decode)[role]
        for at, pair in (*item.groups, (long, None)):
            points.append(f"{across(min(at, long)):.1f},{up(last):.1f}")
            last = last if pair is None else pair[role]
            points.append(f"{across(min(at, long)):.1f},{up(last):.1f}")
        return f'<polyline class="{name} line" points="{" ".join(points)}"/>'

    drawn = (
        _axes(long, high, "seconds")
        + line("second", lambda moment: moment.waiting)
        + line("first", lambda moment: moment.writing)
        + steps("third dash", 0)
        + steps("first dash", 1)
    )
    words = (
        f"Run {number}: requests that wait for their first token (orange) and that are written (blue); dashed: the "
        f"groups that serve, prefill (green) and decode (blue), {numbers(item)}."
    )
    return _figure(f"Waiting and running requests of run {number} over time", drawn, words)


def round_end(most: float) -> float:
    """Return where an axis to ``most``, above 0, ends: the least number not below it whose quarters are short."""
    step = most / 4
    size = 10.0 ** math.floor(math.log10(step))
    return 4 * size * next(count for count in _STEPS if count * size >= step * (1 - 1e-9))


def _scales(most_across: float, most_up: float) -> tuple[Callable[[float], float], Callable[[float], float]]:
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    return (
        lambda value: _LEFT + wide * value / most_across,
        lambda value: _TOP + high * (1 - value / most_up),
    )


def _axes(most_across: float, most_up: float, below: str, *, share: bool = False) -> str:
    across, up = _scales(most_across, most_up)
    drawn = []
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = across(part * most_across), up(part * most_up)
        beside = f"{part:.0%}" if share else f"{part * most_up:.3g}"
        drawn.append(
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{beside}</text>'
            f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{part * most_across:.3g}</text>'
        )
    drawn.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{below}</text>')
    return "".join(drawn)


def _figure(label: str, drawn: str, words: str) -> str:
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{escape(label)}"'
    return f"<figure><svg {box}>{drawn}</svg><figcaption>{escape(words)}</figcaption></figure>"
