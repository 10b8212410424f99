"""A worker pod without Kubernetes: the launcher's zipapp, run by the engine's own Python on an address of its own.

What the end-to-end tests of the engine start and look at.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from twinpool.core.protocol import WorkerConfig
from twinpool.localengine.image import serving_environment
from twinpool.localengine.models import TINY

if TYPE_CHECKING:
    from collections.abc import Mapping
    from http.client import HTTPResponse
    from pathlib import Path

    from twinpool.localengine.layout import Engine

KV_BYTES = 256 * 2**20


def worker_config(**settings: Any) -> WorkerConfig:
    """Return the settings of a worker, those that every one needs filled in unless they are given."""
    base: dict[str, Any] = {
        "pool": "p",
        "namespace": "n",
        "role": "decode",
        "revision": "r",
        "engine": "vllm",
        "model": "m",
        "model_path": "org/m",
    }
    return WorkerConfig(**{**base, **settings})


def tiny_config(**changes: Any) -> WorkerConfig:
    """Return the settings of a worker of a pool that serves the tiny model."""
    base: dict[str, Any] = {
        "model": "tiny",
        "model_path": str(TINY.folder),
        "max_model_len": 2048,
        "connector": "nixl",
        "startup_timeout": 300.0,
        "args": (f"--kv-cache-memory-bytes={KV_BYTES}", "--seed=0"),
    }
    return worker_config(**{**base, **changes})


class LauncherPod:
    """The launcher as the engine's container would run it; it lives until :meth:`end`."""

    def __init__(
        self,
        engine: Engine,
        zipapp: Path,
        folder: Path,
        ip: str,
        settings: WorkerConfig,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir()
        self.ip = ip
        self.log = folder / "log"
        self.termination = folder / "termination"
        env = {
            "HOME": os.environ.get("HOME", "/"),
            **serving_environment(engine),
            "POD_IP": ip,
            "TWINPOOL_WORKER": settings.to_json(),
            "TWINPOOL_TERMINATION_LOG": str(self.termination),
            **(environment or {}),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [engine.python.with_name("python3"), zipapp, "run"], env=env, stdout=log, stderr=log
            )

    def get(self, path: str) -> tuple[int, str]:
        """Return what the launcher answers; status 0 while it does not listen."""
        try:
            with urllib.request.urlopen(f"http://{self.ip}:8090{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def readyz(self) -> tuple[int, str]:
        """Return what the launcher says of its readiness."""
        return self.get("/readyz")

    def status(self) -> dict[str, Any]:
        """Return everything that the launcher says of itself."""
        status: dict[str, Any] = json.loads(self.get("/status")[1])
        return status

    def wait_ready(self, seconds: float = 240.0) -> None:
        """Wait until requests may come."""
        deadline = time.monotonic() + seconds
        while self.readyz()[0] != 200:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.2)

    def open(
        self, path: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> HTTPResponse:
        """Ask the engine."""
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(f"http://{self.ip}:8000{path}", data, sent)
        response: HTTPResponse = urllib.request.urlopen(request, timeout=120)  # noqa: S310 - the scheme is in the line above
        return response

    def complete(self, **body: Any) -> dict[str, Any]:
        """Return a greedy completion."""
        with self.open("/v1/completions", {"model": "tiny", "temperature": 0, **body}) as answer:
            completion: dict[str, Any] = json.load(answer)
        return completion

    def metrics(self) -> str:
        """Return the engine's metrics."""
        with self.open("/metrics") as answer:
            return answer.read().decode()

    def prompt_tokens_by_source(self) -> dict[str, float]:
        """Return where the tokens of prompts came from so far, over all data-parallel ranks."""
        found: dict[str, float] = {}
        for line in self.metrics().splitlines():
            if "prompt_tokens_by_source_total{" in line:
                source = line.split('source="')[1].split('"')[0]
                found[source] = found.get(source, 0.0) + float(line.split()[-1])
        return found


def end(*processes: subprocess.Popen[bytes]) -> None:
    """Ask processes to end, all at once, and kill those that have not within a minute."""
    for process in processes:
        process.terminate()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        process.kill()
        process.wait()
