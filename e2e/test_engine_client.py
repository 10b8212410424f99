"""Load generators as clients of the router, unchanged: they know nothing of prefill and decode workers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.parse
from http.client import HTTPConnection
from typing import TYPE_CHECKING

import pytest

from bench.router.peers import AIPERF, installed
from twinpool.localengine.image import serving_environment
from twinpool.localengine.models import TINY
from twinpool.localengine.pod import end

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twinpool.localengine.layout import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HOST = f"127.{224 + os.getpid() % 16}.{os.getpid() // 16 % 256}"
REQUESTS = 40


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a router in front of simulated twins."""
    folder = tmp_path_factory.mktemp("router")
    workers = [{"role": role, "host": f"{HOST}.{number}"} for number, role in enumerate(("prefill", "decode"), 1)]
    (folder / "workers.json").write_text(json.dumps(workers))
    flags = ["--model", "m", "--connector", "nixl", "--tokens-per-second", "500", "--max-model-len", "8192"]
    commands = [
        ["-m", "twinpool.worker", "simulate", "--host", worker["host"], "--role", worker["role"], *flags]
        for worker in workers
    ]
    commands.append(
        ["-m", "twinpool.router", "--host", f"{HOST}.9", "--model", "m", "--endpoints", str(folder / "workers.json")]
    )
    with (folder / "log").open("w") as log, contextlib.ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
            stack.callback(end, process)
        deadline = time.monotonic() + 120
        while served(f"{HOST}.9", "/v1/completions", {"model": "m", "prompt": "x", "max_tokens": 1}) != 200:
            assert time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            time.sleep(0.2)
        yield f"http://{HOST}.9:8000"


def served(host: str, path: str, body: dict[str, object]) -> int:
    connection = HTTPConnection(host, 8000, timeout=30)
    with contextlib.suppress(OSError), contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse().status
    return 0


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_vllm_bench_serve_runs_unchanged(engine: Engine, router: str, tmp_path: Path, backend: str, path: str) -> None:
    result = tmp_path / "result.json"
    argv = [str(engine.python), "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend]
    argv += ["--base-url", router, "--endpoint", path, "--model", "m", "--tokenizer", str(TINY.folder)]
    argv += ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16", "--ignore-eos"]
    argv += ["--num-prompts", str(REQUESTS), "--max-concurrency", "8", "--disable-tqdm"]
    argv += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", result.name]
    environment = {**serving_environment(engine), "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads(result.read_text())
    assert (found["completed"], found.get("failed", 0)) == (REQUESTS, 0)
    assert found["total_output_tokens"] == REQUESTS * 16
    handed = remote(urllib.parse.urlsplit(router).hostname or "")
    assert handed >= REQUESTS


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_aiperf_runs_unchanged(router: str, tmp_path: Path, kind: str) -> None:
    command = installed(AIPERF)
    assert command is not None, f"{AIPERF} cannot be installed here"
    argv = [str(command), "profile", "--model-names", "m", "--tokenizer", str(TINY.folder), "--url", router]
    argv += ["--endpoint-type", kind, "--streaming", "--request-count", str(REQUESTS), "--concurrency", "8"]
    argv += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16", "--extra-inputs", "ignore_eos:true"]
    argv += ["--use-server-token-count", "--ui", "none", "--artifact-dir", str(tmp_path)]
    before = remote(urllib.parse.urlsplit(router).hostname or "")
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert found["output_sequence_length"]["min"] == found["output_sequence_length"]["max"] == 16
    assert not found["error_summary"]
    assert found["time_to_first_token"]["avg"] > 0
    assert remote(urllib.parse.urlsplit(router).hostname or "") - before == REQUESTS


def remote(host: str) -> float:
    """Return how many requests the router handed over from a prefill to a decode worker."""
    connection = HTTPConnection(host, 8081, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    name = 'twinpool_router_handoffs_total{outcome="remote",reason=""} '
    return next(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))
