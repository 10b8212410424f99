"""What the guides work out by hand is what the decisions say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from bench.placement.cases import node, pool
from twinpool.cli.rollout import _write_plan
from twinpool.core.topology import PRESETS, Weights, topology
from twinpool.operator.logic.forecast import forecast
from twinpool.operator.logic.placement.model import Constraints
from twinpool.operator.logic.placement.score import score
from twinpool.operator.logic.placement.tree import tree
from twinpool.operator.logic.rollout import Bounds, Health, State, Unit

if TYPE_CHECKING:
    import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_steps_of_a_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    units = [Unit(f"p{n}", "prefill", "old", Health.READY) for n in range(2)]
    units += [Unit(f"d{n}", "decode", "old", Health.READY) for n in range(4)]
    begin = State(tuple(units), {"prefill": Bounds(2, 1, 0), "decode": Bounds(4, 1, 0)}, "new")
    _write_plan("llama", begin, list(forecast(begin)))
    said = (DOCS / "rollout.md").read_text().partition("```text\n")[2].partition("```")[0]
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == said.splitlines()


def test_three_placements_of_one_pool() -> None:
    nodes = [node(f"n{n}", f"b{n // 4}", f"r{n // 2}", None, 8) for n in range(8)]
    groups, network = pool("p", 2, 2, 8), tree(topology(PRESETS["topograph"]), nodes)
    text = (DOCS / "placement.md").read_text().partition("### Example")[2]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| n")]
    assert len(rows) == 3
    for prefill, decode, *figures in rows:
        names = [name.strip() for name in (*prefill.split(","), *decode.split(","))]
        places = {group.name: (name,) for group, name in zip(groups, names, strict=True)}
        found = score(groups, places, network, {"p": Constraints()}, Weights())
        terms = dataclasses.asdict(found)
        wanted = [terms[name] for name in ("handoff", "pair", "spread", "stranded")] + [found.total]
        assert [figure.strip().strip("*") for figure in figures] == [f"{value:.2f}" for value in wanted]
