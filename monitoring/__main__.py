"""``python -m monitoring``: write the generated files, or say which of them are stale."""

from __future__ import annotations

import sys
from pathlib import Path

from monitoring import rules
from monitoring.boards import DASHBOARDS
from monitoring.grafana import render

ROOT = Path(__file__).parents[1]
_CHART = "charts/twinpool/files"
_FOLDERS = (f"{_CHART}/dashboards", "docs/alerts")


def files() -> dict[str, str]:
    """Return every generated file: its path in the repository, and its text."""
    return {
        **{f"{_CHART}/dashboards/{board.uid}.json": render(board) for board in DASHBOARDS},
        f"{_CHART}/alerts.yaml": rules.rule_file(),
        "docs/alerts/README.md": rules.index(),
        **{f"docs/alerts/{alert.name}.md": rules.runbook(alert) for alert in rules.ALERTS},
    }


def stale() -> list[str]:
    """Return the files that differ from what is generated, are missing, or are generated no more."""
    made = files()
    there = {str(path.relative_to(ROOT)) for folder in _FOLDERS for path in (ROOT / folder).glob("*")}
    return sorted((there - set(made)) | {path for path, text in made.items() if not _same(path, text)})


def _same(path: str, text: str) -> bool:
    return (ROOT / path).is_file() and (ROOT / path).read_text() == text


def write() -> None:
    """Write all files, and remove those that are generated no more."""
    made = files()
    for path in stale():
        if path in made:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(made[path])
        else:
            (ROOT / path).unlink()


def main(arguments: list[str]) -> int:
    """Run ``write`` or ``check``."""
    if arguments == ["write"]:
        write()
        return 0
    if arguments != ["check"]:
        sys.stderr.write("usage: python -m monitoring write|check\n")
        return 2
    for path in stale():
        sys.stderr.write(f"{path} is not what monitoring/ generates: run `make generate` and commit the result\n")
    return 1 if stale() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
