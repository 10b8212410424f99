"""The simulated engine beside the real vLLM: the same questions; every difference in shape is known and explained."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from twinpool.core.protocol import ENGINE_PORT, WorkerConfig
from twinpool.localengine import conformance
from twinpool.localengine.conformance import QUESTIONS
from twinpool.localengine.image import serving_environment
from twinpool.localengine.models import TINY
from twinpool.localengine.pod import end
from twinpool.worker.engines.command import Pod
from twinpool.worker.engines.select import engine_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twinpool.localengine.layout import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

#: Differences that are meant, by question, the simulated engine first; none is left.
KNOWN: dict[str, list[str]] = {}
#: How often a question is asked whose answers differ.
TRIES = 5


def start(kind: str, number: int, engine: Engine, log: Path) -> tuple[str, subprocess.Popen[bytes]]:
    """Start an engine with the flags that the launcher gives it; return its address and process."""
    host = f"127.{208 + os.getpid() % 16}.{os.getpid() // 16 % 256}.{number}"
    real = kind == "vllm"
    config = WorkerConfig(
        pool="p",
        namespace="n",
        role="prefill",
        revision="r",
        engine="vllm" if real else "simulated",
        model="tiny",
        model_path=str(TINY.folder),
        python=str(engine.python),
        max_model_len=2048,
        connector="nixl",
        args=("--kv-cache-memory-bytes=268435456", "--seed=0") if real else ("--time-scale=0",),
    )
    environment = {**serving_environment(engine), "HOME": os.environ.get("HOME", "/")} if real else dict(os.environ)
    command = engine_command(config, Pod(host), environment, 0, sys.executable)
    with log.open("w") as output:
        process = subprocess.Popen(command.argv, env=dict(command.environment), stdout=output, stderr=output)
    return host, process


@pytest.fixture(scope="module")
def hosts(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The addresses of a simulated and of a real prefill engine."""
    logs = tmp_path_factory.mktemp("engines")
    with contextlib.ExitStack() as stack:
        started = []
        for number, kind in enumerate(("simulated", "vllm"), start=1):
            started.append((*start(kind, number, engine, logs / kind), logs / kind))
            stack.callback(end, started[-1][1])
        for host, process, log in started:
            wait(host, process, log)
        yield [host for host, _, _ in started]


def wait(host: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while conformance.ask(host, ENGINE_PORT, QUESTIONS["completion"]).status != 200:
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.5)


def differences(hosts: list[str], question: conformance.Question) -> list[str]:
    """Return what differs each time: a busy vLLM may send all tokens in one event, and then no event has but one."""
    lines: list[str] = []
    for _ in range(TRIES):
        simulated, real = (conformance.ask(host, ENGINE_PORT, question) for host in hosts)
        lines = conformance.differences(simulated, real)
        if not lines:
            break
    return lines


def test_every_difference_is_known(hosts: list[str]) -> None:
    found = {}
    for name, question in QUESTIONS.items():
        if lines := differences(hosts, question):
            found[name] = lines
            print(name, *lines, sep="\n  ")
    assert found == KNOWN
