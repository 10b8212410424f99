"""``python -m bench.ratio.live``: 1:3, 2:2 and 3:1 of four real vLLM engines on the CPU, by the work that is counted.

The same four engines (the tiny model) serve every split, since vLLM's NIXL connector lets any of them prefill or
decode. Clients in a closed loop keep them busy. Two cores cannot run four engines at once, so wall time would measure
the scheduler: what is counted is the CPU seconds of each engine's process tree. Were each engine alone on its own
core, the busiest one would end last; requests over its CPU seconds are what the split serves at saturation. What that
leaves out: waiting for each other, and batches of another size than those on a shared machine. Each prompt goes to the
engine of a role with the fewest tokens in hand.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.harness.cpu import cpu_seconds
from bench.harness.handoff import handed_off, prompt_of
from bench.harness.vllm import twins
from twinpool.core.errors import TwinpoolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.harness.vllm import Running

_HOSTS = tuple(f"127.36.0.{number}" for number in range(1, 5))
SPLITS = (1, 2, 3)
_CLIENTS = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """Tokens of every prompt and answer: what long prompts, both, and long answers are to the tiny model."""

    name: str
    prompt: int
    output: int


KINDS = (Kind("long prompts", 1600, 8), Kind("both", 800, 60), Kind("long answers", 64, 160))


@dataclass(frozen=True, slots=True)
class Count:
    """CPU seconds of each engine for a number of requests; the first ``prefills`` engines prefilled."""

    prefills: int
    requests: int
    seconds: Sequence[float]

    @property
    def served(self) -> float:
        """Return requests over the CPU seconds of the busiest engine."""
        return self.requests / max(self.seconds)

    @property
    def each(self) -> tuple[float, float]:
        """Return CPU seconds of a request in prefill and in decode."""
        return sum(self.seconds[: self.prefills]) / self.requests, sum(self.seconds[self.prefills :]) / self.requests


def counted(engines: Sequence[Running], prefills: int, kind: Kind, requests: int, dice: Random) -> Count:
    """Serve ``requests`` with ``prefills`` of the engines prefilling, and count what each engine worked."""
    before = [cpu_seconds(engine.pid) for engine in engines]
    asyncio.run(_served([engine.host for engine in engines], prefills, kind, requests, dice))
    return Count(prefills, requests, [cpu_seconds(one.pid) - old for one, old in zip(engines, before, strict=True)])


async def _served(hosts: Sequence[str], prefills: int, kind: Kind, requests: int, dice: Random) -> None:
    hand = dict.fromkeys(hosts, 0)
    left: Iterator[int] = iter(range(requests))

    async def client() -> None:
        for _ in left:
            prefill, decode = (min(role, key=hand.__getitem__) for role in (hosts[:prefills], hosts[prefills:]))
            hand[prefill] += kind.prompt
            hand[decode] += kind.prompt + kind.output
            await handed_off(prefill, decode, prompt_of(kind.prompt, dice), kind.output)
            hand[prefill] -= kind.prompt
            hand[decode] -= kind.prompt + kind.output

    await asyncio.gather(*(client() for _ in range(_CLIENTS)))


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0, or 2 when an engine is missing or failed."""
    parser = argparse.ArgumentParser(prog="bench.ratio.live", description="Ratios of real engines, by counted work.")
    parser.add_argument("--runs", type=int, default=3, help="runs of each split and workload (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=48, help="requests of each run (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="also write what was counted as JSON")
    arguments = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as folder, twins(_HOSTS, Path(folder)) as engines:
            found = _all(engines, arguments.runs, arguments.requests)
    except TwinpoolError as error:
        print(f"bench.ratio.live: {error}", file=sys.stderr)
        return 2
    _show(found)
    if arguments.out is not None:
        listed = [[kind, one.prefills, one.requests, one.seconds] for kind, counts in found.items() for one in counts]
        arguments.out.write_text(json.dumps(listed))
    return 0


def _all(engines: Sequence[Running], runs: int, requests: int) -> dict[str, list[Count]]:
    """Take all runs, each split and workload once before any again; the first ones warm up and do not count."""
    dice = Random(1)
    found: dict[str, list[Count]] = {kind.name: [] for kind in KINDS}
    for number in range(runs + 1):
        for kind in KINDS:
            for prefills in SPLITS:
                count = counted(engines, prefills, kind, requests if number else _CLIENTS, dice)
                print(
                    f"run {number}, {kind.name}, {prefills}:{len(engines) - prefills}: {count.served:.2f}", flush=True
                )
                if number:
                    found[kind.name].append(count)
    return found


def _show(found: dict[str, list[Count]]) -> None:
    table = Table(title="requests for each CPU second of the busiest of four engines (least to greatest of all runs)")
    columns = ("workload", *(f"{count}:{len(_HOSTS) - count}" for count in SPLITS), "prefill, decode of a request")
    for column in columns:
        table.add_column(column, justify="left" if column == "workload" else "right")
    for kind, counts in found.items():
        served = [[one.served for one in counts if one.prefills == prefills] for prefills in SPLITS]
        words = [f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in served]
        even = [one.each for one in counts if one.prefills == 2]
        work = ", ".join(f"{1000 * statistics.median(one[role] for one in even):.0f} ms" for role in (0, 1))
        table.add_row(kind, *words, work)
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
