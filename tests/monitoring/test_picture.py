"""Dashboards drawn as SVG."""

import xml.etree.ElementTree as ElementTree

import pytest

from monitoring.overview import OVERVIEW
from monitoring.picture import DARK, LIGHT, NAMES, Line, draw, named, runs, scale, words
from monitoring.router import ROUTER

POINTS = [(float(n), n / 10) for n in range(10)]
NAN = float("nan")


def texts(picture):
    return [item.text or "" for item in ElementTree.fromstring(picture).iter() if item.tag.endswith("text")]  # noqa: S314 - our own text


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_a_dashboard_is_drawn_with_names_and_last_values(theme):
    lines = {"Time to first token": [Line("p50 <&>", POINTS), Line("objective", POINTS, dashed=True)]}
    picture = draw(OVERVIEW, lines, theme, "invented")
    shown = texts(picture)
    assert {"p50 <&>  900 ms", "invented", "Twinpool / Overview", "Objectives"} <= set(shown)
    assert "stroke-dasharray" in picture
    assert theme.paper in picture
    assert shown.count("no data") == len(OVERVIEW.panels) - 1


def test_an_excused_panel_says_why_it_is_empty():
    assert "no data: series exist only while a worker is avoided" in texts(draw(ROUTER, {}, LIGHT))


def test_a_crowd_of_series_is_cut_and_counted():
    many = [Line(f"pod {n} {'x' * 80}", [(0.0, float(n))]) for n in range(NAMES + 3)]
    shown = texts(draw(ROUTER, {"In flight by worker": many}, LIGHT))
    assert "and 3 more" in shown
    assert any(text.startswith("pod 10 x") and "…" in text for text in shown)
    assert not any(text.startswith("pod 0 x") for text in shown)


def test_a_table_shows_names_alone():
    lines = {"Conditions": [Line("Ready: True (Serving)", [(0.0, 1.0)])]}
    assert "Ready: True (Serving)" in texts(draw(OVERVIEW, lines, DARK))


def test_gaps_stay_gaps():
    assert runs([(0, 1.0), (1, NAN), (2, 3.0), (3, 4.0), (9, 5.0)]) == [
        [(0, 1.0)], [(2, 3.0), (3, 4.0)], [(9, 5.0)]
    ]  # fmt: skip
    assert runs([]) == []
    assert Line("x", [(0, NAN)]).last != Line("x", [(0, NAN)]).last
    assert Line("x", [(0, 2.0), (1, NAN)]).last == 2.0


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [(0.0, [0.0, 1.0]), (1.0, [0.0, 0.25, 0.5, 0.75, 1.0]), (7.0, [0, 2, 4, 6, 8]), (90, [0, 25, 50, 75, 100])],
)
def test_axes_have_round_steps(highest, ticks):
    assert scale(highest) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (0.0123, "s", "12.3 ms"),
        (2.0, "s", "2 s"),
        (0.0, "s", "0 s"),
        (0.02, "percentunit", "2 %"),
        (2.5e9, "Bps", "2.5 GB/s"),
        (12.0, "Bps", "12 B/s"),
        (1500.0, "reqps", "1.5 k/s"),
        (3.0, "short", "3"),
        (NAN, "short", "-"),
    ],
)
def test_values_have_units(value, unit, said):
    assert words(value, unit) == said


def test_names_are_filled_in():
    assert named("{{role}} {{kind}}", {"role": "decode"}) == "decode"
