"""``python -m bench.scaling.cells``: the scaling benchmark in parts, for machines without an hour to spare.

``--list`` names the cells; ``--run NAME --seeds 10 --out FOLDER`` takes seeds of one cell, of all without a name, and
keeps in FOLDER what every rule reached, so that further seeds add to it; ``--again RULE`` forgets first what was kept
of one rule, which has changed since; ``--rules PREFIX`` takes only rules whose names begin so; ``--report FOLDER``
prints all that was kept: attainment of every rule beside ours with its 95 % interval, the regret, and every loss.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.scaling.benchmark import MEAN_REGRET, WORST_REGRET, Place, figures, show
from bench.scaling.pool import Result
from bench.scaling.workloads import WORKLOADS
from twinpool.core.errors import InvalidValue, TwinpoolError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; for a report 1 when a bar was missed; 2 when something needed is missing."""
    parser = argparse.ArgumentParser(prog="bench.scaling.cells", description=__doc__.splitlines()[0] if __doc__ else "")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="name the cells")
    what.add_argument("--run", metavar="NAME", nargs="*", help="take seeds of these cells; of all without a name")
    what.add_argument("--report", type=Path, metavar="FOLDER", help="print what was kept")
    parser.add_argument("--seeds", type=int, default=10, help="seeds that each cell shall have (default: %(default)s)")
    parser.add_argument("--rules", default="", metavar="PREFIX", help="take only rules whose names begin so")
    parser.add_argument("--again", metavar="RULE", help="forget first what was kept of rules whose names begin so")
    parser.add_argument("--out", type=Path, default=Path("scaling-cells"), metavar="FOLDER", help="where to keep them")
    arguments = parser.parse_args(argv)
    try:
        if arguments.report is not None:
            return _report(arguments.report)
        cells = {workload.name: workload for workload in WORKLOADS}
        if arguments.list:
            print("\n".join(cells))
            return 0
        places = []
        for name in arguments.run or cells:
            if name not in cells:
                raise InvalidValue(f"there is no cell {name!r}", "see --list")
            places.append(_read(arguments.out, Place(cells[name], 1)))
            if arguments.again is not None:
                places[-1].forget(arguments.again)
        # Seed by seed, so that whatever there is can be compared.
        for number in range(arguments.seeds):
            for place in places:
                _take(place, number, arguments.rules, arguments.out)
            print(f"{number + 1} seeds of {len(places)} cells", flush=True)
    except TwinpoolError as error:
        print(f"bench.scaling.cells: {error}", file=sys.stderr)
        return 2
    return 0


def _file(folder: Path, place: Place) -> Path:
    return folder / (re.sub(r"[^a-z0-9.]+", "-", place.workload.name) + ".json")


def _read(folder: Path, place: Place) -> Place:
    path = _file(folder, place)
    if path.exists():
        kept = json.loads(path.read_text())
        place.found = {(name, knob): [Result(*run) for run in runs] for name, knob, runs in kept}
    return place


def _take(place: Place, number: int, rules: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    place.take(number, rules)
    kept = [
        (name, knob, [(run.attained, run.gpu_hours, run.changes) for run in runs])
        for (name, knob), runs in place.found.items()
    ]
    _file(folder, place).write_text(json.dumps(kept))


def _report(folder: Path) -> int:
    places = [place for place in (_read(folder, Place(workload, 1)) for workload in WORKLOADS) if place.found]
    if not places:
        raise InvalidValue(f"{folder} has no cells", "run some with --run")
    show(places)
    mean, worst, changes = figures(places)
    seeds = [len(runs) for place in places for runs in place.found.values()]
    print(
        f"{len(places)} cells, {min(seeds)} to {max(seeds)} seeds each: mean regret {mean():.4f} (bar {MEAN_REGRET}),"
    )
    print(f"worst {worst():.4f} (bar {WORST_REGRET}), changes {changes():.2f} of the median of the rules (bar 1)")
    for place in sorted(places, key=lambda place: -place.regret()):
        if place.regret() > 0:
            print(f"  behind by {place.regret():.4f}: {place.workload.name}")
    return int(mean() > MEAN_REGRET or worst() > WORST_REGRET or changes() > 1)


if __name__ == "__main__":
    sys.exit(main())
