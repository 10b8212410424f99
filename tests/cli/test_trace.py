"""``twinpool trace``: drawn requests as lines that simulate and bench read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from twinpool.cli.__main__ import main
from twinpool.simulate.traces import read

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_lines_come_out_that_are_read_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["trace", "servegen", "--rate", "3", "--length", "2m", "--shared", "0.4"]
    assert main(asked) == 0
    said = capsys.readouterr()
    found, problems = read(said.out.splitlines())
    assert (len(found) > 100, problems) == (True, ())
    assert f"{len(found)} requests, " in said.err
    assert set(json.loads(said.out.splitlines()[0])) == {"timestamp", "input_length", "output_length", "hash_ids"}
    file = tmp_path / "requests.jsonl"
    assert main([*asked, "--out", str(file)]) == 0
    assert file.read_text() == said.out


def test_what_goes_wrong_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["trace", "poisson", "--rate", "0.001", "--length", "1s"]) == 0
    assert "no request came" in capsys.readouterr().err
    assert main(["trace", "poisson", "--rate", "0"]) == 1
    assert "give a rate and a length above 0" in capsys.readouterr().err.replace("\n", " ")
    assert main(["trace", "poisson", "--length", "long"]) == 1
    assert main(["trace", "poisson", "--out", str(tmp_path / "none" / "file")]) == 1
    assert "cannot be written" in capsys.readouterr().err
