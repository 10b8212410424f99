"""CPU of vLLM per token under the launcher, beside the same vLLM with the same flags and nobody above it.

The launcher asks its engine for counters and, when it is idle, for a token; that is all it may cost.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.cell import Bar, Cell
from bench.harness.cpu import cpu_seconds
from bench.harness.load import stream
from bench.harness.vllm import launched, prepared, wait
from twinpool.core.protocol import ENGINE_PORT
from twinpool.localengine.pod import LauncherPod, end, tiny_config
from twinpool.worker.inject import inject

if TYPE_CHECKING:
    from collections.abc import Iterator

TITLE = "engine: CPU of vLLM under the launcher"

_OURS, _BESIDE = "127.33.0.1", "127.33.0.2"
_STREAMS = 8
_NOTE = "beside: the same vLLM (a tiny model on the CPU) with the same flags, started directly."


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Start vLLM twice, once under the launcher."""
    engine = prepared()
    settings = tiny_config(connector=None, role="aggregated", python=str(engine.python))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = LauncherPod(engine, inject(folder), folder / "ours", _OURS, settings)
        stack.callback(end, ours.process)
        beside = launched(engine, settings, _BESIDE, folder / "beside.log")
        stack.callback(end, beside)
        for process, host in ((ours.process, _OURS), (beside, _BESIDE)):
            wait(process, host)
        yield [
            Cell(
                what=what,
                unit="CPU s / 1k tokens",
                ours=lambda body=body: _sample(ours.process.pid, _OURS, body, quick),  # type: ignore[misc]
                beside=lambda body=body: _sample(beside.pid, _BESIDE, body, quick),  # type: ignore[misc]
                bar=Bar("ratio", at_most=1.1),
                note=_NOTE,
            )
            for what, body in (
                ("8 streams of 100 tokens", {"prompt": "benchmark", "max_tokens": 100}),
                ("8 prompts of 800 tokens, 4 tokens each", {"prompt": list(range(100, 900)), "max_tokens": 4}),
            )
        ]


def _sample(pid: int, host: str, body: dict[str, Any], quick: bool) -> float:
    """Return the CPU of one batch of requests, whose salts keep them out of each other's cache."""
    tokens: int = body["max_tokens"]
    request = {"model": "tiny", "stream": True, "ignore_eos": True, "temperature": 0, **body}
    count = 16 if quick else 48
    salts = [f"{time.monotonic_ns()}-{number}" for number in range(count)]
    before = cpu_seconds(pid)
    sent = [json.dumps({**request, "cache_salt": salt}).encode() for salt in salts]
    stream(host, ENGINE_PORT, "/v1/completions", sent, _STREAMS, count)
    return (cpu_seconds(pid) - before) / (count * tokens) * 1000
