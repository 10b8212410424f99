"""Real engines for benchmarks: vLLM with the tiny model on the CPU, each on an address of its own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from bench.harness.load import stream
from twinpool.core.errors import TwinpoolError
from twinpool.core.protocol import ENGINE_PORT
from twinpool.localcluster.progress import Progress
from twinpool.localengine.image import serving_environment
from twinpool.localengine.install import ensure_engine
from twinpool.localengine.models import TINY, ensure_model
from twinpool.localengine.pod import end, tiny_config
from twinpool.worker.engines.command import Place, Pod
from twinpool.worker.engines.vllm.flags import vllm_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from twinpool.core.protocol import WorkerConfig
    from twinpool.localengine.layout import Engine

_START_SECONDS = 300


class Running(NamedTuple):
    """An engine that serves: where, and the process at the top of its tree."""

    host: str
    pid: int


def prepared() -> Engine:
    """Return the engine, installed with its model on first use."""
    engine = ensure_engine(Progress())
    ensure_model(TINY, engine, Progress())
    return engine


def launched(engine: Engine, settings: WorkerConfig, host: str, log: Path) -> subprocess.Popen[bytes]:
    """Start vLLM on ``host`` with the flags that the launcher would give it, and nobody above it."""
    environment = {"HOME": os.environ.get("HOME", "/"), **serving_environment(engine)}
    command = vllm_command(settings, Pod(host), environment, 0, Place())
    with log.open("w") as output:
        return subprocess.Popen(command.argv, env=dict(command.environment), stdout=output, stderr=output)


@contextmanager
def twins(hosts: Sequence[str], folder: Path) -> Iterator[list[Running]]:
    """Start one engine on each of ``hosts`` while the block runs; any of them may prefill for, or decode after, others.

    vLLM's NIXL connector pulls, and checks no role while it does (0.32: a producer decodes as a consumer does).
    """
    engine, processes = prepared(), []
    try:
        for host in hosts:
            settings = tiny_config(role="decode", python=str(engine.python))
            processes.append(launched(engine, settings, host, folder / f"{host}.log"))
        for process, host in zip(processes, hosts, strict=True):
            wait(process, host)
        yield [Running(host, process.pid) for process, host in zip(processes, hosts, strict=True)]
    finally:
        end(*processes)


def wait(process: subprocess.Popen[bytes], host: str) -> None:
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
