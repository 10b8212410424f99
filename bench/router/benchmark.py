"""CPU of the router per streamed request, beside vLLM's own router under the same load."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench.harness.cell import Bar, Cell
from bench.harness.cpu import cpu_seconds
from bench.harness.load import LoadFailed, stream
from bench.harness.server import free_port, started
from bench.router.peer import VERSION, installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TITLE = "router: CPU per streamed request"

_HOST = "127.0.0.1"
_CHUNKS = 16
_CHAT = json.dumps(
    {"model": "m", "prompt": "benchmark " * 20, "max_tokens": _CHUNKS, "stream": True, "ignore_eos": True}
).encode()
_NOTE = (
    f"beside: vllm-router {VERSION} in front of the same two or four engines, which do nothing but write a fixed stream"
)
_NO_PEER = f"vllm-router {VERSION} could not be installed here, so nothing stands beside"


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Start four engines, our router twice and the peer twice: round robin over two, and prefill/decode over four."""
    peer = installed()
    with ExitStack() as stack:
        engines = [_engine(stack) for _ in range(4)]
        whole = [("decode", port) for port in engines[2:]]
        split = [("prefill", port) for port in engines[:2]] + whole
        rows = (("whole requests, round robin", whole, 0.75), ("prefill and decode", split, 0.5))
        result = []
        for what, endpoints, bar in rows:
            ours = _ours(stack, endpoints)
            beside = _peer(stack, peer, endpoints) if peer is not None else None
            result.append(
                Cell(
                    what=f"{what}, {_CHUNKS} events",
                    unit="CPU s / 1k requests",
                    ours=_sampler(*ours, quick),
                    beside=_sampler(*beside, quick) if beside is not None else None,
                    bar=Bar("ratio", at_most=bar) if beside is not None else None,
                    note=_NOTE if beside is not None else _NO_PEER,
                )
            )
        yield result


def _engine(stack: ExitStack) -> int:
    port = free_port()
    argv = [sys.executable, "-m", "bench.router.backend", str(port), str(_CHUNKS)]
    stack.enter_context(started(argv, host=_HOST, port=port))
    return port


def _ours(stack: ExitStack, endpoints: list[tuple[str, int]]) -> tuple[int, int]:
    folder = Path(stack.enter_context(TemporaryDirectory()))
    listed = folder / "workers.json"
    listed.write_text(json.dumps([{"role": role, "host": _HOST, "port": port} for role, port in endpoints]))
    port, admin = free_port(), free_port()
    argv = [sys.executable, "-m", "twinpool.router", "--endpoints", str(listed), "--model", "m"]
    argv += ["--policy", "round-robin", "--port", str(port), "--admin-port", str(admin), "--lame-duck", "0"]
    pid = stack.enter_context(started(argv, host=_HOST, port=port))
    _until_answering(port)
    return pid, port


def _peer(stack: ExitStack, peer: Path, endpoints: list[tuple[str, int]]) -> tuple[int, int]:
    port = free_port()
    argv = [str(peer), "--host", _HOST, "--port", str(port)]
    argv += ["--policy", "round_robin", "--log-level", "error", "--prometheus-port", str(free_port())]
    urls = {role: [f"http://{_HOST}:{p}" for r, p in endpoints if r == role] for role in ("prefill", "decode")}
    if urls["prefill"]:
        argv.append("--vllm-pd-disaggregation")
        for role, values in urls.items():
            for url in values:
                argv += [f"--{role}", url]
    else:
        argv += ["--worker-urls", *urls["decode"]]
    pid = stack.enter_context(started(argv, host=_HOST, port=port))
    _until_answering(port)
    return pid, port


def _until_answering(port: int) -> None:
    """Wait until a request gets through: a router listens before it knows its workers."""
    deadline = time.monotonic() + 20
    while True:
        request = urllib.request.Request(
            f"http://{_HOST}:{port}/v1/completions", _CHAT, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310 - a fixed loopback address
                answer.read()
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LoadFailed(f"the router on port {port} does not answer: {error}", "start it by hand") from None
            time.sleep(0.1)


def _sampler(pid: int, port: int, quick: bool) -> Callable[[], float]:
    def sample() -> float:
        requests = 4000 if quick else 12000
        before = cpu_seconds(pid)
        stream(_HOST, port, "/v1/completions", _CHAT, 32, requests)
        return (cpu_seconds(pid) - before) / requests * 1000

    return sample
