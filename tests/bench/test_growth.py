"""The plot of placement's growth: what it draws is what was measured."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from bench.placement.growth import Series, full, measured, n_log_n, svg

SVG = "{http://www.w3.org/2000/svg}"


def test_the_shortest_run_of_each_size_counts() -> None:
    times = iter([3.0, 1.0, 2.0] * 4)
    found = measured((100, 200), lambda size, pools: next(times) * size * pools)
    assert [one.points for one in found] == [((100, 5000.0), (200, 10000.0)), ((100, 400.0), (200, 1600.0))]


def test_n_log_n_goes_through_the_first_point() -> None:
    assert n_log_n(100, (100, 0.5)) == 0.5
    assert n_log_n(10_000, (100, 0.5)) == pytest.approx(0.5 * 100 * math.log(10_000) / math.log(100))


def test_the_plot_has_every_point_and_says_how_it_grew() -> None:
    series = [Series("same", ((100, 0.02), (1000, 0.4))), Series("more", ((100, 0.05), (1000, 0.5)))]
    drawn = ElementTree.fromstring(svg(series, "a machine"))  # noqa: S314 - our own text
    circles = drawn.findall(f"{SVG}circle")
    assert len(circles) == 4
    heights = [float(circle.attrib["cy"]) for circle in circles]
    assert heights[0] > heights[1], "more seconds are higher up"
    assert heights[3] < heights[1], "0.5 s is above 0.4 s"
    words = " ".join(text.text or "" for text in drawn.findall(f"{SVG}text"))
    assert "same: 0.40 s at 1,000 nodes, 1.33 of n log n" in words
    assert "a machine" in words


def test_a_full_plan_takes_some_time() -> None:
    assert full(40, 2) > 0
