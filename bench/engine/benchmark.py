"""CPU of vLLM per token under the launcher, beside the same vLLM with the same flags and nobody above it.

The launcher asks its engine for counters and, when it is idle, for a token; that is all it may cost.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness.cell import Bar, Cell
from bench.harness.cpu import cpu_seconds
from bench.harness.load import stream
from twinpool.core.errors import TwinpoolError
from twinpool.core.protocol import ENGINE_PORT
from twinpool.localcluster.progress import Progress
from twinpool.localengine.image import serving_environment
from twinpool.localengine.install import ensure_engine
from twinpool.localengine.models import TINY, ensure_model
from twinpool.localengine.pod import LauncherPod, tiny_config
from twinpool.worker.engines.command import Place, Pod
from twinpool.worker.engines.vllm.flags import vllm_command
from twinpool.worker.inject import inject

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localengine.layout import Engine

TITLE = "engine: CPU of vLLM under the launcher"

_OURS, _BESIDE = "127.33.0.1", "127.33.0.2"
_START_SECONDS = 300
_STREAMS = 8
_NOTE = "beside: the same vLLM (a tiny model on the CPU) with the same flags, started directly."


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Start vLLM twice, once under the launcher."""
    engine = ensure_engine(Progress())
    ensure_model(TINY, engine, Progress())
    settings = tiny_config(connector=None, role="aggregated", python=str(engine.python))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = LauncherPod(engine, inject(folder), folder / "ours", _OURS, settings)
        stack.callback(_end, ours.process)
        command = vllm_command(settings, Pod(_BESIDE), _environment(engine), 0, Place())
        log = stack.enter_context((folder / "beside.log").open("w"))
        beside = subprocess.Popen(command.argv, env=dict(command.environment), stdout=log, stderr=log)
        stack.callback(_end, beside)
        for process, host in ((ours.process, _OURS), (beside, _BESIDE)):
            _wait(process, host)
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


def _environment(engine: Engine) -> dict[str, str]:
    return {"HOME": os.environ.get("HOME", "/"), **serving_environment(engine)}


def _wait(process: subprocess.Popen[bytes], host: str) -> None:
    """Wait until a token comes.

    Raises
    ------
    TwinpoolError
        The engine ended, or did not answer in time.
    """
    deadline = time.monotonic() + _START_SECONDS
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1, "stream": True}).encode()
    while True:
        try:
            stream(host, ENGINE_PORT, "/v1/completions", [body], 1, 1)
        except (OSError, TwinpoolError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise TwinpoolError(f"vLLM on {host} did not start", "see `make demo`, which shows its log") from None
            time.sleep(1.0)
        else:
            return


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


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
