"""Which benchmarks there are: every folder beside this one with a ``benchmark.py``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from twinpool.core.errors import TwinpoolError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from bench.harness.cell import Cell

_FOLDER = Path(__file__).resolve().parent.parent


class Benchmark(Protocol):
    """What ``bench/<name>/benchmark.py`` defines; the module itself is the benchmark."""

    TITLE: str

    def cells(self, quick: bool) -> AbstractContextManager[Sequence[Cell]]:
        """Start what the benchmark needs, give its cells, and end everything again."""
        ...


class UnknownBenchmark(TwinpoolError):
    """There is no benchmark of that name."""


def names(folder: Path = _FOLDER) -> list[str]:
    """Return the benchmarks that can be run, sorted."""
    return sorted(path.parent.name for path in folder.glob("*/benchmark.py"))


def load(name: str, folder: Path = _FOLDER) -> Benchmark:
    """Import the benchmark ``name``.

    Raises
    ------
    UnknownBenchmark
        When there is none; the message lists those that exist.
    """
    existing = names(folder)
    if name not in existing:
        raise UnknownBenchmark(f"there is no benchmark {name!r}", f"choose one of: {', '.join(existing)}")
    return cast("Benchmark", importlib.import_module(f"bench.{name}.benchmark"))
