"""The house rules that no other tool checks."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PORTIONS = ("core", "operator", "router", "worker", "simulate", "cli", "e2e")


@pytest.mark.parametrize("portion", PORTIONS)
def test_no_portion_of_the_namespace_is_a_package_itself(portion: str) -> None:
    # operator/__init__.py would shadow the standard library's operator and break every Python started here.
    assert not (ROOT / portion / "__init__.py").exists()
    assert not (ROOT / portion / "twinpool" / "__init__.py").exists()


def test_python_starts_in_the_root() -> None:
    subprocess.run([sys.executable, "-c", "import operator; operator.eq(1, 1)"], cwd=ROOT, check=True)


def test_requirements_hold_no_addresses() -> None:
    for path in [*(ROOT / "requirements").glob("*.txt"), *ROOT.glob("e2e/**/requirements*.txt")]:
        for line in path.read_text().splitlines():
            assert "://" not in line, f"{path.name}: {line}"
            assert not line.startswith("--"), f"{path.name}: {line}"
    assert not (ROOT / "uv.lock").exists()


def test_every_extra_has_its_pinned_list() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {path.stem for path in (ROOT / "requirements").glob("*.txt")} == set(extras)


def test_typed_packages_say_so() -> None:
    for portion in PORTIONS:
        for package in (ROOT / portion / "twinpool").iterdir():
            if any(package.rglob("*.py")):
                assert (package / "py.typed").exists(), package


def test_modules_stay_readable() -> None:
    for portion in PORTIONS:
        for path in (ROOT / portion / "twinpool").rglob("*.py"):
            lines = len(path.read_text().splitlines())
            assert lines <= 400, f"{path.relative_to(ROOT)} has {lines} lines: one concept a file"
