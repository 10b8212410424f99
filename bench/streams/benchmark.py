"""What the router adds to a request's time, what an open stream costs, and whether many endpoints cost more."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.harness.cell import Bar, Cell
from bench.harness.cpu import cpu_seconds
from bench.harness.load import stream
from bench.router import routers
from bench.router.benchmark import prompts
from bench.router.routers import HEADERS, HOST
from bench.streams.load import added_latency, open_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.router.routers import Running

TITLE = "router: added time, open streams, many endpoints"

_PATH = "/v1/completions"
_RATE = 300.0
_FEW, _MANY = 4, 512


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Start the engines, and a router for each row."""
    with ExitStack() as stack:
        spans = routers.collector(stack)
        whole = [routers.engine(stack, "decode", 16) for _ in range(2)]
        router, engine = routers.ours(stack, whole, "price", spans), whole[0].port
        # So slow that all streams are open before the first one ends. A stream is two open files of its data process.
        slow = [routers.engine(stack, "decode", 4 if quick else 16, 1.0 if quick else 2.0) for _ in range(2)]
        patient = routers.ours(stack, slow, "least-load", spans, 2)
        idle = routers.ours(stack, whole, "price", spans)
        many = routers.engines(stack, "decode", 16, _MANY)
        few_of_them, all_of_them = (
            _cpu(routers.ours(stack, many[:count], "price", spans), quick) for count in (_FEW, _MANY)
        )
        empty = _rss(patient[0])
        short, seconds, streams = prompts(200), 2.0 if quick else 20.0, 1000 if quick else 10_000
        yield [
            Cell(
                f"added to a whole answer at {_RATE:g} requests/s, median",
                "us",
                lambda: (
                    1e6
                    * added_latency(HOST, router[1], engine, _PATH, short, rate=_RATE, seconds=seconds, headers=HEADERS)
                ),
                bar=Bar("ours", at_most=300),
            ),
            Cell("memory of a data process without clients", "MiB", lambda: _rss(idle[0]), bar=Bar("ours", at_most=60)),
            Cell(
                f"memory of each of {streams:,} open streams on two processes, {1 if quick else 2} s between events",
                "KiB",
                lambda: _stream_kib(patient, short[0], streams, empty),
                bar=Bar("ours", at_most=20),
            ),
            Cell(
                f"{_MANY} endpoints beside {_FEW}, 2,000 characters",
                "CPU s / 1k requests",
                all_of_them,
                few_of_them,
                Bar("ratio", at_most=1.5),
                f"{_MANY} endpoints: beside the same router with {_FEW}; the engines are one process at as many "
                "addresses, and publish no KV events",
            ),
        ]


def _cpu(running: Running, quick: bool) -> Callable[[], float]:
    pid, port = running
    bodies, requests = prompts(2000), 2000 if quick else 8000
    stream(HOST, port, _PATH, bodies, 32, 1000, HEADERS)  # opens connections, and finds all workers well

    def sample() -> float:
        before = cpu_seconds(pid)
        stream(HOST, port, _PATH, bodies, 32, requests, HEADERS)
        return (cpu_seconds(pid) - before) / requests * 1000

    return sample


def _stream_kib(running: Running, body: bytes, count: int, empty: float) -> float:
    """Return the KiB of each stream above the ``empty`` MiB that processes had before any: they keep what they took."""
    full = open_streams(HOST, running[1], _PATH, body, count, HEADERS, lambda: _rss(running[0]))
    return (full - empty) / count * 1024


def _rss(pid: int) -> float:
    """Return the resident memory of a router's data processes, in MiB."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(_resident(Path(f"/proc/{child}/status").read_text()) for child in children)


def _resident(status: str) -> float:
    return next(float(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024
