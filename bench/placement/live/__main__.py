"""``python -m bench.placement.live [--cases 200] [--first 0]``: random clusters on a local control plane."""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.operator.api import Api
from bench.placement.live.play import Outcome, command_line, play
from twinpool.demo.phases import Phases
from twinpool.demo.scenario import install_twinpool
from twinpool.localcluster import cluster as clusters
from twinpool.localcluster import toolchain
from twinpool.localcluster.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twinpool.localcluster.cluster import LocalCluster

#: One node that has processes, for the operator; it has no GPUs.
_NODES = "nodes: [{name: real}]\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Play cases, say how each went, and return 1 when something was not as it must be."""
    parser = argparse.ArgumentParser(prog="bench.placement.live", description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="how many random clusters")
    parser.add_argument("--first", type=int, default=0, help="seed of the first")
    options = parser.parse_args(argv)
    began = time.monotonic()
    toolchain.ensure(Progress())
    with control_plane() as cluster:
        found = asyncio.run(play_all(cluster, range(options.first, options.first + options.cases)))
    wrong = sum(bool(outcome.wrong) for outcome in found)
    print(
        f"{len(found)} clusters, {sum(item.competed for item in found)} with competing pods; "
        f"{sum(item.groups for item in found)} groups, {sum(item.short for item in found)} of them short; "
        f"{wrong} not as they must be; {time.monotonic() - began:.0f} s"
    )
    return 1 if wrong else 0


@contextmanager
def control_plane() -> Iterator[LocalCluster]:
    """Start a control plane with Twinpool on it."""
    with tempfile.TemporaryDirectory() as folder:
        nodes = Path(folder) / "nodes.yaml"
        nodes.write_text(_NODES)
        name = next(name for i in itertools.count() if clusters.is_free(name := f"random-{i}"))
        with clusters.running(name, nodes=nodes) as local:
            install_twinpool(local, Phases(io.StringIO()))
            yield local


async def play_all(cluster: LocalCluster, seeds: Sequence[int]) -> list[Outcome]:
    """Play one case after another, and say how each went."""
    found = []
    with command_line(cluster):
        async with Api(cluster.kubeconfig) as api:
            for seed in seeds:
                found.append(await play(api, seed))
                _tell(found[-1])
    return found


def _tell(outcome: Outcome) -> None:
    words = "as it must be" if not outcome.wrong else f"WRONG: {'; '.join(outcome.wrong)}"
    rivals = ", others compete" if outcome.competed else ""
    groups = f"{outcome.groups} groups, {outcome.short} short{rivals}"
    print(f"case {outcome.seed}: {groups}, {outcome.seconds:.1f} s: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
