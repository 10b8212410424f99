import io
import json
import re
from pathlib import Path

import pytest
import yaml

from twinpool.cli.__main__ import main
from twinpool.cli.crd import Stale, check_fresh, crd_yaml

ROOT = Path(__file__).parents[2]
GOOD = """\
apiVersion: serving.twinpool.dev/v1alpha1
kind: InferencePool
metadata: {name: good}
spec: {model: {name: m}, decode: {}}
"""
BAD = """\
apiVersion: serving.twinpool.dev/v1alpha1
kind: InferencePool
metadata: {name: bad}
spec: {model: {name: m, flavour: vanilla}, decode: {replicas: 1, drainTimeout: "25"}, prefil: {}}
"""


def test_the_committed_crd_is_fresh() -> None:
    check_fresh(ROOT / "crds" / "inferencepools.serving.twinpool.dev.yaml", crd_yaml(), "spec.py")


def test_a_stale_crd_is_found(tmp_path: Path) -> None:
    stale = tmp_path / "crd.yaml"
    stale.write_text(crd_yaml().replace("tpool", "tp"))
    with pytest.raises(Stale, match="make generate"):
        check_fresh(stale, crd_yaml(), "spec.py")
    with pytest.raises(Stale):
        check_fresh(tmp_path / "missing.yaml", crd_yaml(), "spec.py")


def test_the_committed_reference_is_fresh(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["crd", "-o", "markdown", "--check", str(ROOT / "docs" / "api.md")]) == 0
    assert main(["crd", "-o", "markdown", "--check", str(ROOT / "README.md")]) == 1
    assert "make generate" in capsys.readouterr().err


def test_crd_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["crd"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "crd.yaml").write_text(text)
    assert main(["crd", "--check", str(tmp_path / "crd.yaml")]) == 0
    (tmp_path / "crd.yaml").write_text(text + "#")
    assert main(["crd", "--check", str(tmp_path / "crd.yaml")]) == 1
    assert "make generate" in capsys.readouterr().err


def test_a_good_manifest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(f"{GOOD}---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: x}}\n")
    assert main(["validate", "-f", str(tmp_path / "pool.yaml")]) == 0
    assert capsys.readouterr().out == "good: ok\n"


def test_a_bad_manifest_names_every_field(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{GOOD}---\n{BAD}"))
    assert main(["validate", "-f", "-", "-o", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["pools"] == ["good", "bad"]
    assert {problem["field"] for problem in report["problems"]} == {
        "spec.decode.drainTimeout",
        "spec.model.flavour",
        "spec.prefil",
    }


def test_text_output_of_a_bad_manifest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(BAD)
    assert main(["validate", "-f", str(tmp_path / "pool.yaml")]) == 1
    assert "bad: spec.prefil: unknown field" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{", "kind: ConfigMap", ""])
def test_a_file_without_pools_is_an_error(text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(text)
    assert main(["validate", "-f", str(tmp_path / "pool.yaml")]) == 1
    assert "pool.yaml" in capsys.readouterr().err


def test_a_missing_file_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "-f", "nowhere.yaml"]) == 1
    assert "nowhere.yaml cannot be read" in capsys.readouterr().err


def test_an_unknown_command_is_not_understood(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 2


def test_the_committed_page_of_metrics_is_fresh(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["metrics", "--check", str(ROOT / "docs" / "metrics.md")]) == 0
    assert main(["metrics", "--check", str(tmp_path / "missing.md")]) == 1
    assert "make generate" in capsys.readouterr().err
    assert main(["metrics"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "metrics.md").read_text()


def test_metrics_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", "-o", "json"]) == 0
    found = {metric["name"]: metric for metric in json.loads(capsys.readouterr().out)}
    assert found["twinpool_router_queue_seconds"]["unit"] == "seconds"


@pytest.mark.parametrize(
    "argv",
    [
        ["validate", "-f", str(ROOT / "examples" / "smallest.yaml")],
        ["metrics"],
        [
            "plan",
            "-f",
            str(ROOT / "examples" / "smallest.yaml"),
            "--nodes",
            str(ROOT / "examples" / "plan" / "nodes.yaml"),
        ],
    ],
    ids=lambda argv: argv[0],
)
def test_yaml_says_what_json_says(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert main([*argv, "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == said


def test_every_command_that_knows_json_knows_yaml() -> None:
    for section in (ROOT / "docs" / "cli.md").read_text().split("\n## ")[1:]:
        for choices in re.findall(r"--output, -o.*\[choices: ([^\]]*)\]", section):
            assert ("json" in choices) == ("yaml" in choices) or "markdown" in choices, section.splitlines()[0]
