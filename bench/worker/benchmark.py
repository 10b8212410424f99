"""CPU of the simulated engine per streamed token, beside a server that does nothing but stream."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bench.harness.cell import Bar, Cell
from bench.harness.cpu import cpu_seconds
from bench.harness.load import stream
from bench.harness.server import free_port, started

if TYPE_CHECKING:
    from collections.abc import Iterator

TITLE = "worker: CPU of the simulated engine"

_HOST = "127.0.0.1"
_TOKENS = 100
_SECONDS_PER_TOKEN = 0.01
_NOTE = (
    "beside: the least that asyncio can do on this machine (fixed bytes, one timer per token, nothing parsed or "
    "counted). Simulated times are not measurements of a real engine."
)


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Start both servers, each a process of its own, at 100 tokens/s per stream."""
    engine, plain = free_port(), free_port()
    speed = ["--tokens-per-second", str(1 / _SECONDS_PER_TOKEN), "--max-num-seqs", "512"]
    ours = [
        sys.executable,
        "-m",
        "twinpool.worker",
        "simulate",
        "--model",
        "m",
        "--port",
        str(engine),
        *speed,
    ]
    beside = [sys.executable, "-m", "bench.worker.plain", str(plain), str(_TOKENS), str(_SECONDS_PER_TOKEN)]
    with (
        started(ours, host=_HOST, port=engine) as engine_pid,
        started(beside, host=_HOST, port=plain) as plain_pid,
    ):
        yield [
            Cell(
                what=f"{streams} streams of {_TOKENS} tokens",
                unit="CPU s / 1k tokens",
                ours=lambda streams=streams: _sample(engine_pid, engine, streams, quick),  # type: ignore[misc]
                beside=lambda streams=streams: _sample(plain_pid, plain, streams, quick),  # type: ignore[misc]
                bar=Bar("ratio", at_most=3.0),
                note=_NOTE,
            )
            for streams in ((64, 256) if quick else (16, 64, 256))
        ]


def _sample(pid: int, port: int, streams: int, quick: bool) -> float:
    # CPU is counted in ticks of 10 ms: fewer streams need more rounds for the same number of tokens.
    requests = 256 if quick else max(256, 4 * streams)
    body = json.dumps(
        {"model": "m", "prompt": "benchmark", "max_tokens": _TOKENS, "ignore_eos": True, "stream": True}
    ).encode()
    before = cpu_seconds(pid)
    events = stream(_HOST, port, "/v1/completions", [body], streams, requests)
    return (cpu_seconds(pid) - before) / events * 1000
