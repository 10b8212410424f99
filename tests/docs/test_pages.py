"""The documentation builds without a warning, pages fetch nothing from elsewhere, and worked examples are right."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import pytest

from twinpool.core.economics import ASSUMED
from twinpool.router.logic import price
from twinpool.router.logic.policy import Ask, Candidate

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def build(out: Path, source: Path = ROOT, configuration: Path = DOCS) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-b", "html"]
    command += ["-d", str(out / "trees"), "-c", str(configuration), str(source), str(out / "html")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pages")
    done = build(out)
    assert done.returncode == 0, done.stderr
    return out / "html"


class Fetched(HTMLParser):
    """Collects what a browser would load for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.addresses.append(found["src"] or "")
        if tag == "link" and found.get("rel") in ("stylesheet", "preload", "icon", "preconnect"):
            self.addresses.append(found.get("href") or "")


def test_pages_need_nothing_from_elsewhere(pages: Path) -> None:
    made = list(pages.rglob("*.html"))
    assert len(made) > 60
    for page in made:
        parser = Fetched()
        parser.feed(page.read_text())
        for address in parser.addresses:
            assert not re.match(r"(https?:)?//", address), f"{page.name} loads {address}"
    for sheet in pages.rglob("*.css"):
        assert "@import" not in sheet.read_text()


def test_every_page_of_the_folder_is_in_the_navigation(pages: Path) -> None:
    first = (pages / "docs" / "README.html").read_text()
    for page in DOCS.glob("*.md"):
        assert f"{page.stem}.html" in first or page.stem == "README", page


def test_links_to_folders_become_words_and_those_to_files_downloads(pages: Path) -> None:
    text = (pages / "docs" / "monitoring.html").read_text()
    assert "_downloads/" in text
    assert "Files, generated from" in text
    assert 'href="../monitoring"' not in text


def test_a_link_to_nowhere_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text("# Title\n\n[there](nowhere.md), [here](#not-a-heading)\n")
    done = build(tmp_path, tmp_path)
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
    assert "not-a-heading" in done.stderr


def test_the_example_of_a_cached_prefix_against_a_queue() -> None:
    ask = Ask(4000, 200)
    calm = price.prefill_prices(ask, [Candidate(1, 4000, 0.2, 3000, 3000), Candidate()], ASSUMED)
    busy = price.prefill_prices(ask, [Candidate(2, 8000, 0.2, 3000, 3000), Candidate(2, 8000, 0.2)], ASSUMED)
    said = re.findall(r"\*\*([\d.]+) s\*\*", (DOCS / "routing.md").read_text())
    assert [f"{cost:.3f}" for cost in (calm[0], busy[0], calm[1], busy[1])] == said


@pytest.mark.parametrize(
    ("decode", "remote", "local"), [(Candidate(), "0.193", "0.139"), (Candidate(16, 32_000), "0.193", "2.201")]
)
def test_the_example_of_a_handoff(decode: Candidate, remote: str, local: str) -> None:
    ask, rng, text = Ask(4000, 200), Random(1), (DOCS / "routing.md").read_text()
    steps = price.decode_price(ask, decode, ASSUMED)
    handed = (
        price.cheapest_prefill(ask, [Candidate()], ASSUMED, rng).price
        + price.cheapest_decode(ask, [decode], ASSUMED, rng).price
    )
    there = price.cheapest_whole(ask, [decode], ASSUMED, rng).price
    assert (f"{handed - steps:.3f}", f"{there - steps:.3f}") == (remote, local)
    assert f"= {remote} s" in text
    assert f"{local} s" in text
    decision = price.decide(ask, [Candidate()], [decode], ASSUMED, rng)
    assert (decision.prefill is None) == (there < handed)
