"""Starts our router and other routers in front of the same engines."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench.harness.load import LoadFailed
from bench.harness.server import free_port, started
from bench.router.peers import SMG, VLLM, installed

if TYPE_CHECKING:
    from contextlib import ExitStack

HOST = "127.0.0.1"
#: Role and port of each engine.
Engines = list[tuple[str, int]]
#: Process id and port.
Running = tuple[int, int]

_ASK = json.dumps({"model": "m", "prompt": "ready?", "max_tokens": 4, "stream": True}).encode()


def engine(stack: ExitStack, chunks: int, pause: float = 0.0) -> int:
    """Start an engine that writes ``chunks`` events, ``pause`` seconds apart; return its port."""
    port = free_port()
    argv = [sys.executable, "-m", "bench.router.backend", str(port), str(chunks), str(pause)]
    stack.enter_context(started(argv, host=HOST, port=port))
    return port


def ours(stack: ExitStack, engines: Engines, policy: str) -> Running:
    """Start our router."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    listed = folder / "workers.json"
    listed.write_text(json.dumps([{"role": role, "host": HOST, "port": port} for role, port in engines]))
    port, admin = free_port(), free_port()
    argv = [sys.executable, "-m", "twinpool.router", "--endpoints", str(listed), "--model", "m"]
    argv += ["--policy", policy, "--port", str(port), "--admin-port", str(admin), "--lame-duck", "0"]
    pid = stack.enter_context(started(argv, host=HOST, port=port))
    _until_answering(port)
    return pid, port


def vllm_router(stack: ExitStack, engines: Engines) -> Running | None:
    """Start vLLM's router with round robin, or return None where it cannot be had."""
    command = installed(VLLM)
    if command is None:
        return None
    argv = [
        str(command),
        "--policy",
        "round_robin",
        "--log-level",
        "error",
        *_urls(engines, "--vllm-pd-disaggregation"),
    ]
    return _peer(stack, argv)


def smg(stack: ExitStack, engines: Engines) -> Running | None:
    """Start smg with its prefix-aware policy, or return None where it cannot be had."""
    command = installed(SMG)
    if command is None:
        return None
    argv = [str(command), "launch", "--policy", "cache_aware", "--log-level", "error"]
    return _peer(stack, [*argv, *_urls(engines, "--pd-disaggregation")])


def _urls(engines: Engines, split: str) -> list[str]:
    urls = {role: [f"http://{HOST}:{p}" for r, p in engines if r == role] for role in ("prefill", "decode")}
    if not urls["prefill"]:
        return ["--worker-urls", *urls["decode"]]
    return [split, *(word for role, values in urls.items() for url in values for word in (f"--{role}", url))]


def _peer(stack: ExitStack, argv: list[str]) -> Running:
    port = free_port()
    argv = [*argv, "--host", HOST, "--port", str(port), "--prometheus-port", str(free_port())]
    pid = stack.enter_context(started(argv, host=HOST, port=port))
    _until_answering(port)
    return pid, port


def _until_answering(port: int) -> None:
    """Wait until a request gets through: a router listens before it knows its workers."""
    deadline = time.monotonic() + 30
    while True:
        request = urllib.request.Request(
            f"http://{HOST}:{port}/v1/completions", _ASK, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310 - a fixed loopback address
                answer.read()
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LoadFailed(f"the router on port {port} does not answer: {error}", "start it by hand") from None
            time.sleep(0.1)
