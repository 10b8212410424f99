"""Every example fits the API types and has a place on the machines of ``examples/plan``; the folder lists them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinpool.cli.__main__ import main

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.yaml"), key=lambda path: path.name)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid_and_can_be_planned(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "-f", str(example)]) == 0
    assert main(["plan", "-f", str(example), "--nodes", str(FOLDER / "plan" / "nodes.yaml")]) == 0
    assert "decode" in capsys.readouterr().out


def test_the_smallest_is_small() -> None:
    lines = (FOLDER / "smallest.yaml").read_text().splitlines()
    assert len([line for line in lines if not line.startswith("#")]) <= 12


def test_the_list_is_complete() -> None:
    text = (FOLDER / "README.md").read_text()
    assert [path.name for path in EXAMPLES if f"({path.name})" not in text] == []
