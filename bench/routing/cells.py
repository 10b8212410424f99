"""``python -m bench.routing.cells``: the routing benchmark in parts, for machines without an hour to spare.

``--list`` names the cells; ``--run NAME --runs 5 --out FOLDER`` takes runs of one cell and keeps in FOLDER what every
rule reached, so that further runs add to it; ``--report FOLDER`` prints all that was kept: attainment of every rule
with its 95 % interval, mean and worst regret, and every loss.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.routing.benchmark import MEAN_REGRET, WORST_REGRET, Place, places, show
from twinpool.core.errors import InvalidValue, TwinpoolError
from twinpool.simulate.rules import OURS, RULES

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; for a report 1 when a bar was missed; 2 when something needed is missing."""
    parser = argparse.ArgumentParser(prog="bench.routing.cells", description=__doc__.splitlines()[0] if __doc__ else "")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="name the cells")
    what.add_argument("--run", metavar="NAME", action="append", help="take runs of this cell; may be repeated")
    what.add_argument("--report", type=Path, metavar="FOLDER", help="print what was kept")
    parser.add_argument("--runs", type=int, default=5, help="runs that each cell shall have (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("routing-cells"), metavar="FOLDER", help="where to keep them")
    arguments = parser.parse_args(argv)
    try:
        if arguments.report is not None:
            return _report(arguments.report)
        cells = {str(place): place for place in places(quick=False)}
        if arguments.list:
            print("\n".join(cells))
            return 0
        for name in arguments.run:
            if name not in cells:
                raise InvalidValue(f"there is no cell {name!r}", "see --list")
            _run(cells[name], arguments.runs, arguments.out)
    except TwinpoolError as error:
        print(f"bench.routing.cells: {error}", file=sys.stderr)
        return 2
    return 0


def _file(folder: Path, place: Place) -> Path:
    return folder / (re.sub(r"[^a-z0-9.]+", "-", str(place)) + ".json")


def _read(folder: Path, place: Place) -> Place:
    path = _file(folder, place)
    if path.exists():
        place.found = json.loads(path.read_text())
    return place


def _run(place: Place, runs: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _read(folder, place)
    while len(place.found.get(OURS, ())) < runs:
        place.run(tuple(RULES))
        _file(folder, place).write_text(json.dumps(place.found))
        print(f"{place}: {len(place.found[OURS])} runs, regret {place.regret():.3f}", flush=True)


def _report(folder: Path) -> int:
    found = [place for place in (_read(folder, place) for place in places(quick=False)) if place.found]
    if not found:
        raise InvalidValue(f"{folder} has no cells", "run some with --run")
    show(found)
    regrets = {str(place): place.regret() for place in found}
    mean, worst = statistics.fmean(regrets.values()), max(regrets.values())
    runs = [len(place.found[OURS]) for place in found]
    print(f"{len(found)} cells, {min(runs)} to {max(runs)} runs each: mean regret {mean:.4f}, worst {worst:.4f}")
    for name, regret in sorted(regrets.items(), key=lambda item: -item[1]):
        if regret > 0:
            print(f"  behind by {regret:.4f}: {name}")
    return int(mean > MEAN_REGRET or worst > WORST_REGRET)


if __name__ == "__main__":
    sys.exit(main())
