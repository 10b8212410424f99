"""The pages of ``docs/topology``: each example is a pool and nodes that ``twinpool plan`` places as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from twinpool.cli.__main__ import main
from twinpool.core.spec import InferencePool
from twinpool.core.topology import PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parents[2] / "docs" / "topology"


def blocks(text: str, kind: str) -> Iterator[str]:
    return (found.group(1) for found in re.finditer(rf"```{kind}\n(.*?)```", text, re.DOTALL))


def test_every_preset_has_a_page() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_page_names_every_label_of_its_preset(preset: str) -> None:
    text = (FOLDER / f"{preset}.md").read_text()
    assert all(f"`{label}`" in text for labels in PRESETS[preset].values() for label in labels)
    rows = re.findall(r"^\| (\w+) \|", text, re.MULTILINE)
    assert [row for row in rows if row not in ("level", "host")] == list(PRESETS[preset])


@pytest.mark.parametrize("preset", PRESETS)
def test_the_example_is_placed_as_the_page_says(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (FOLDER / f"{preset}.md").read_text()
    pool, nodes = blocks(text, "yaml")
    InferencePool.model_validate(yaml.safe_load(pool))
    (tmp_path / "pool.yaml").write_text(pool)
    (tmp_path / "nodes.yaml").write_text(nodes)
    (said,) = blocks(text, "console")
    command, *lines = said.splitlines()
    arguments = command.removeprefix("$ twinpool ").split()
    files = [f"{tmp_path}/{word}" if word.endswith(".yaml") else word for word in arguments]
    assert main(files) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if " rank " in line] == lines
    assert "not used at level" not in out, "labels of the example contradict each other"
