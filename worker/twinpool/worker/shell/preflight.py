"""Before the engine: run this pod's ranks of the preflight, then become the engine.

This process is what the launcher starts in the engine's place. It ends every rank before it turns into the engine, so
the engine finds all of the GPUs' memory free, and the launcher's one child keeps its process id.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.worker.logic.preflight import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds that importing torch may take on a cold disk.
IMPORT_SECONDS = 120.0
#: Seconds until all ranks have come, which includes their imports, and for the measurement after that.
MEET_SECONDS = 120.0
BUDGET_SECONDS = 20.0


@dataclass(frozen=True)
class Plan:
    """What this pod's part of a preflight is."""

    python: str
    pod: str
    #: Ranks of this pod, its first one, and all ranks of the group.
    local: int
    first: int
    world: int
    leader: str
    port: int
    #: Where the result goes.
    result: Path
    #: Seconds until all ranks have come, and for the measurement after that.
    meet: float = MEET_SECONDS
    budget: float = BUDGET_SECONDS


def this_program() -> list[str]:
    """Return the arguments with which an interpreter runs this program again: the zipapp, or the installed package."""
    return [sys.argv[0]] if zipfile.is_zipfile(sys.argv[0]) else ["-m", "twinpool.worker"]


def run(plan: Plan, engine: Sequence[str]) -> int:
    """Run the preflight and become the engine; return an exit code only when the ranks cannot work together."""
    found = measure(plan)
    temporary = plan.result.with_suffix(".part")
    temporary.write_text(found.to_json(), encoding="utf-8")
    temporary.replace(plan.result)
    if found.outcome == "failed":
        print(f"PreflightError: {found.problem}", file=sys.stderr, flush=True)
        return 1
    for line in (f"preflight {found.outcome}" + (f": {found.problem}" if found.problem else ""), *found.warnings):
        print(f"twinpool-worker: {line}", file=sys.stderr, flush=True)
    try:
        os.execvp(engine[0], list(engine))  # noqa: S606 - the engine's own command line, no shell
    except OSError as error:
        hint = "set engine.python to an interpreter of the image"
        print(f"OSError: cannot start {engine[0]!r}: {error.strerror} - {hint}", file=sys.stderr, flush=True)
    return 1


def measure(plan: Plan) -> Result:
    """Run this pod's ranks to their end and return what the first of them found, or the first problem."""
    with tempfile.TemporaryDirectory(prefix="twinpool-preflight-") as folder:
        files = [Path(folder) / f"{number}.json" for number in range(plan.local)]
        ranks = []
        try:
            for number, file in enumerate(files):
                words = _rank_words(plan, number)
                ranks.append(subprocess.Popen([plan.python, *this_program(), "preflight-rank", *words, str(file)]))
            deadline = time.monotonic() + IMPORT_SECONDS + plan.meet + 2 * plan.budget
            for rank in ranks:
                rank.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Result(
                "unfinished", f"the messages of the ranks of pod {plan.pod} did not end within {plan.budget:g} s"
            )
        except OSError as error:
            return Result("skipped", f"cannot start {plan.python!r}: {error.strerror}")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return _first(files, plan)


def _first(files: Sequence[Path], plan: Plan) -> Result:
    results = [Result.from_json(file.read_text(encoding="utf-8")) if file.exists() else None for file in files]
    for number, result in enumerate(results):
        if result is None:
            return Result("unfinished", f"rank {plan.first + number} of pod {plan.pod} ended without a result")
        if result.outcome != "passed":
            return result
    first = results[0]
    assert first is not None, "there is at least one rank"
    return first


def _rank_words(plan: Plan, number: int) -> list[str]:
    """Return the arguments of the ``number``-th rank of this pod."""
    seat = {
        "rank": plan.first + number,
        "world": plan.world,
        "local": number,
        "pod": plan.pod,
        "leader": plan.leader,
        "port": plan.port,
        "meet": plan.meet,
        "budget": plan.budget,
    }
    return [f"--{name}={value}" for name, value in seat.items()]
