"""How Sphinx makes pages of the Markdown files: the same files are read on a git host, so nothing of Sphinx is in them.

The source folder is the repository, for pages link to sources, examples and manifests, which become downloads. What
belongs where in the navigation is :data:`NAVIGATION`. ``make docs`` fails on any warning.
"""

from __future__ import annotations

import re
from importlib.metadata import version as _version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

project = "Twinpool"
version = release = _version("twinpool")
copyright = "the authors of Twinpool"  # noqa: A001 - Sphinx reads this name
root_doc = "docs/README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/README.md", "examples/README.md", "docs/**"]
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
nitpicky = True
highlight_language = "none"
# Colours only: a shell prompt's comment with an apostrophe and a colon in PromQL are beyond Pygments.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "Twinpool"
html_copy_source = False
html_show_sphinx = False
html_static_path: list[str] = ["pages"]
html_css_files = ["pages.css"]

#: Caption, and pages in order; * stands for all pages of a folder. Pages that are named nowhere come last.
NAVIGATION: dict[str, list[str]] = {
    "Begin": ["README", "docs/concepts", "docs/faq", "docs/install", "examples/README"],
    "Serve": ["docs/sizing", "docs/weights", "docs/router", "docs/pod-template", "docs/tracing"],
    "How it decides": [
        "docs/routing",
        "docs/scaling",
        "docs/placement",
        "docs/rollout",
        "docs/parallelism",
        "docs/speculation",
        "docs/kv-tiers",
        "docs/experts",
    ],
    "Network": ["docs/topology/*", "docs/preflight"],
    "Run": ["docs/operations", "docs/explain", "docs/bench", "docs/worker-health"],
    "Watch": ["docs/monitoring", "docs/alerts/README", "docs/metrics"],
    "Reference": ["docs/api", "docs/cli", "CHANGELOG"],
    "Background": ["docs/peers", "docs/immunity", "bench/README", "CONTRIBUTING", "docs/adr/README"],
}
#: Pages that stand below another one.
BELOW = {
    "docs/alerts/README": ("Runbooks", ["docs/alerts/Twinpool*"]),
    "docs/adr/README": ("Decisions", ["docs/adr/0*"]),
}
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
#: A link to a folder of the repository, which no page and no file stands for.
_FOLDER = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)#:\s]+)\)")


def unnamed() -> list[str]:
    """Return the pages of this folder that the navigation does not name."""
    pages = [path.relative_to(ROOT).with_suffix("").as_posix() for path in sorted(ROOT.glob("docs/*.md"))]
    named = {root_doc, *(page for pages in NAVIGATION.values() for page in pages)}
    return [page for page in pages if page not in named]


def tree(caption: str, pages: list[str]) -> str:
    """Return one part of the navigation as a directive."""
    glob = "\n:glob:" if any("*" in page for page in pages) else ""
    lines = "\n".join(f"/{page}" for page in pages)
    return f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n:titlesonly:{glob}\n\n{lines}\n```\n"


def _read(_: Sphinx, page: str, source: list[str]) -> None:
    """Add the navigation to the first page, and leave links to folders out, which only a git host can show."""
    folder = (ROOT / page).parent

    def shown(link: re.Match[str]) -> str:
        return link[1] if (folder / link[2]).is_dir() else link[0]

    text, at = "", 0
    for fence in _FENCE.finditer(source[0]):
        text += _FOLDER.sub(shown, source[0][at : fence.start()]) + fence[0]
        at = fence.end()
    source[0] = text + _FOLDER.sub(shown, source[0][at:])
    if page == root_doc:
        parts = {**NAVIGATION, **({"More": unnamed()} if unnamed() else {})}
        source[0] += "".join(tree(caption, pages) for caption, pages in parts.items())
    if page in BELOW:
        source[0] += tree(*BELOW[page])


def _finish(app: Sphinx, error: Exception | None) -> None:
    """Make the folder's own address show the first page."""
    if error is None:
        page = f"{root_doc}.html"
        head = f'<meta charset="utf-8"><title>Twinpool</title><meta http-equiv="refresh" content="0; url={page}">'
        (Path(app.outdir) / "index.html").write_text(f'<!doctype html>{head}<a href="{page}">Twinpool</a>\n')


def setup(app: Sphinx) -> dict[str, bool]:
    """Register what is above."""
    app.connect("source-read", _read)
    app.connect("build-finished", _finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
