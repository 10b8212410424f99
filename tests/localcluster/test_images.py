"""Images: commands of this machine by name, written for the nodes and read back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from twinpool.localcluster import images
from twinpool.localcluster.errors import ClusterError
from twinpool.localcluster.images import Image


def test_our_parts_start_from_the_environment_that_runs_this() -> None:
    found = images.default_images()
    assert sorted(found) == ["twinpool/operator:dev", "twinpool/router:dev", "twinpool/worker:dev"]
    router = found["twinpool/router:dev"]
    assert router.entrypoint == ("twinpool-router",)
    assert router.env["PATH"].startswith(f"{Path(sys.executable).parent}:")


def test_written_images_are_read_back(tmp_path: Path) -> None:
    given = {
        "a": Image(("sh", "-c"), ("true",), {"X": "1"}, {"/model": "/srv/model"}, "/tmp"),
        "b": Image(pull_error="no such image"),
        "c": Image(),
        **images.default_images(),
    }
    path = tmp_path / "images.json"
    images.write(path, given)
    assert images.load(path) == given
    assert json.loads(path.read_text())["a"] == {
        "entrypoint": ["sh", "-c"],
        "args": ["true"],
        "env": {"X": "1"},
        "files": {"/model": "/srv/model"},
        "workingDir": "/tmp",
    }
    assert [p.name for p in tmp_path.iterdir()] == ["images.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "images file .*: Expecting .* - give a JSON object"),
        ("[]", "holds no JSON object"),
        ('{"a": {"entrypoints": []}}', "image 'a' is not understood - the fields are entrypoint, args"),
        ('{"a": {"entrypoint": "sh"}}', "image 'a': entrypoint is not a list of strings"),
        ('{"a": {"args": [1]}}', "image 'a': args is not a list of strings"),
        ('{"a": {"files": ["/x"]}}', "image 'a': files is not an object of strings"),
        ('{"a": {"env": {"X": 1}}}', "image 'a': env is not an object of strings"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "images.json"
    path.write_text(text)
    with pytest.raises(ClusterError, match=message):
        images.load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"nowhere\.json"):
        images.load(tmp_path / "nowhere.json")
