"""Links of the documentation lead somewhere: files exist, and headings that are named are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def pages() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split()]


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives the headings of a page."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return False
    path, _, anchor = target.partition("#")
    there = (page.parent / path).resolve() if path else page
    return not there.exists() or bool(anchor and there.suffix == ".md" and anchor not in anchors(there))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = _FENCE.sub("", page.read_text())
    assert [target for target in _LINK.findall(text) if broken(page, target)] == []


def test_a_broken_link_is_found() -> None:
    readme = ROOT / "README.md"
    assert broken(readme, "docs/nowhere.md")
    assert broken(readme, "docs/install.md#nowhere")
    assert not broken(readme, "docs/install.md#upgrade-roll-back-uninstall")
    assert not broken(readme, "https://example.com/")
