"""No container engine is needed here: what the Dockerfile names must exist, and it must not run as root."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("part", ["operator", "router", "worker"])
def test_a_part_has_the_list_and_the_console_script_that_its_image_needs(part: str) -> None:
    copied = [source.replace("${PART}", part) for source in re.findall(r"^COPY (?!--from)(\S+)", TEXT, re.MULTILINE)]
    assert f"requirements/{part}.txt" in copied
    assert not [source for source in copied if not (ROOT / source).exists()]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert 'twinpool-${PART}"' in TEXT
    assert f"twinpool-{part}" in scripts
    assert part in re.findall(r"[a-z]+", TEXT.partition("case")[2].partition("esac")[0])


def test_the_user_is_the_one_of_the_manifests() -> None:
    (user,) = re.findall(r"^USER (\d+):", TEXT, re.MULTILINE)
    assert f"runAsUser: {user}" in (ROOT / "deploy" / "operator.yaml").read_text()
