"""The page of a simulation: every run is on it, nothing is loaded from elsewhere, and a browser draws it."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from twinpool.simulate.engines import Job
from twinpool.simulate.report import frontier, page, round_end
from twinpool.simulate.scores import Score
from twinpool.simulate.traces import Request
from twinpool.simulate.whatif import Moment, Outcome, Variant, course

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MOMENTS = tuple(Moment(10.0 * n, n % 7, 2 * n) for n in range(20))


def outcome(attained: float, hours: float, rule: str = "price", moments: tuple[Moment, ...] = MOMENTS) -> Outcome:
    return Outcome(Variant(1.0, rule, 2, 3), Score(attained, 0.2, 0.9, 0.03, 0.4), hours, moments)


FOLLOWS = Outcome(
    Variant(1.0, "price", 2, 3, scaled=True), Score(0.97, 0.2, 0.9, 0.03, 0.4), 5.0, MOMENTS,
    groups=((0.0, (2, 3)), (60.0, (4, 3)), (120.0, (4, 1))),
)  # fmt: skip
RUNS = [outcome(0.9, 4.0), outcome(0.99, 8.0, "<b>&"), outcome(0.8, 6.0), outcome(0.95, 8.0, moments=()), FOLLOWS]


def test_the_frontier_is_what_nothing_beats() -> None:
    assert frontier(RUNS) == [0, 4, 1]
    assert frontier([]) == []


@pytest.mark.parametrize("runs", [RUNS, []])
def test_every_run_is_on_the_page_which_is_well_formed_and_needs_nothing_else(runs: list[Outcome]) -> None:
    text = page("pool <with> trace", "2:3, since & more", runs)
    assert "nothing here was measured" in text
    assert not re.search(r"https?://|src=|@import|<script|<link", text)
    assert "prefers-color-scheme: dark" in text
    body = text[text.index("<body>") : text.index("</body>") + 7]
    tree = ElementTree.fromstring(body)  # noqa: S314 - our own
    assert len(tree.findall(".//tbody/tr")) == len(runs)
    assert len(tree.findall(".//circle")) == len(runs)
    assert len(tree.findall(".//svg")) == 1 + len(runs)
    assert all(svg.get("aria-label") for svg in tree.findall(".//svg"))
    assert "nan" not in body
    assert ("<td>2-4:1-3</td>" in body) == bool(runs)


def test_numbers_that_change_are_drawn_as_steps() -> None:
    text = page("pool", "", [FOLLOWS])
    (line,) = re.findall(r'class="third dash line" points="([^"]*)"', text)
    heights = [float(point.split(",")[1]) for point in line.split()]
    assert heights == sorted(heights, reverse=True), "two prefill groups, then four"
    assert len(set(heights)) == 2


@pytest.mark.parametrize(
    ("most", "end"),
    [(1.89, 2.0), (15.0, 16.0), (16.0, 16.0), (4, 4.0), (143.0, 160.0), (0.52, 0.8), (3999, 4000.0), (1, 1.2)],
)
def test_axes_end_at_numbers_with_short_quarters(most: float, end: float) -> None:
    assert round_end(most) == pytest.approx(end)


def test_the_course_counts_who_waits_and_who_is_written() -> None:
    jobs = [Job(Request(0.0, 10, 5)), Job(Request(4.0, 10, 5)), Job(Request(6.0, 10, 5))]
    jobs[0].first, jobs[0].finish = 2.0, 6.0
    jobs[1].first, jobs[1].finish = 5.0, 10.0
    found = course(jobs, 10)
    assert [moment.at for moment in found] == [float(n) for n in range(11)]
    assert [moment.waiting for moment in found] == [1, 1, 0, 0, 1, 0, 1, 1, 1, 1, 1], "the third is never answered"
    assert [moment.writing for moment in found] == [0, 0, 1, 1, 1, 2, 1, 1, 1, 1, 0]
    assert jobs[2].finish == math.inf
    assert course([], 1) == (Moment(0.0, 0, 0), Moment(0.0, 0, 0))


def test_a_browser_draws_it(browse: Callable[..., str], tmp_path: Path) -> None:
    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(page("pool with trace", "2:3", RUNS))
    browse(file.as_uri(), f"--screenshot={picture}", size="900,2000")
    assert picture.stat().st_size > 20_000
