"""Starts our router and other routers in front of the same engines.

Ours does all that a pool in production asks of it: it wants an API key, follows the engines' KV events, and logs and
traces one request in a hundred. The others do nothing of that.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from bench.harness.load import LoadFailed
from bench.harness.server import free_port, started
from bench.router.backend import addresses, command
from bench.router.peers import SMG, VLLM, installed
from twinpool.core.protocol import ROUTER_CONFIG_ENV, RouterConfig

if TYPE_CHECKING:
    from contextlib import ExitStack

    from twinpool.core.protocol import Policy

HOST = "127.0.0.1"
#: What clients send, whoever routes.
KEY = "bench-key-0123456789abcdef"
HEADERS = f"authorization: Bearer {KEY}\r\n"
#: Process id and port.
Running = tuple[int, int]


class Engine(NamedTuple):
    """One engine: its ports for HTTP and, unless 0, for KV events."""

    role: str
    port: int
    events: int = 0
    host: str = HOST


Engines = list[Engine]

_ASK = json.dumps({"model": "m", "prompt": "ready?", "max_tokens": 4, "stream": True}).encode()


def engine(stack: ExitStack, role: str, chunks: int, pause: float = 0.0) -> Engine:
    """Start an engine that writes ``chunks`` events, ``pause`` seconds apart, and publishes KV events."""
    return _engine(stack, Engine(role, free_port(), free_port()), chunks, pause)


def engines(stack: ExitStack, role: str, chunks: int, count: int) -> Engines:
    """Start what looks like ``count`` engines and is one process; it publishes no KV events."""
    one = _engine(stack, Engine(role, free_port()), chunks, 0.0, count)
    return [one._replace(host=address) for address in addresses(count)]


def collector(stack: ExitStack) -> int:
    """Start something that takes spans, as it takes everything; return its port."""
    return _engine(stack, Engine("collector", free_port()), 1, 0.0).port


def _engine(stack: ExitStack, made: Engine, chunks: int, pause: float, count: int = 1) -> Engine:
    argv = command(made.port, chunks, pause=pause, events=made.events, count=count)
    stack.enter_context(started(argv, host=HOST, port=made.port))
    return made


def ours(stack: ExitStack, engines: Engines, policy: Policy, spans: int, processes: int = 1) -> Running:
    """Start our router with so many data processes; ``spans`` is the port of what takes spans."""
    folder = Path(stack.enter_context(TemporaryDirectory()))
    keys = folder / "keys"
    keys.mkdir()
    (keys / "bench").write_text(KEY)
    listed = folder / "workers.json"
    workers = [{"role": one.role, "host": one.host, "port": one.port, "kvEvents": one.events} for one in engines]
    listed.write_text(json.dumps(workers))
    config = RouterConfig(
        pool="bench",
        namespace="default",
        models=("m",),
        disaggregated=any(one.role == "prefill" for one in engines),
        policy=policy,
        auth=True,
        access_log=0.01,
        tracing_url=f"http://{HOST}:{spans}/v1/traces",
        tracing_sampling=0.01,
    )
    port, admin = free_port(), free_port()
    argv = [sys.executable, "-m", "twinpool.router", "--endpoints", str(listed), "--api-keys", str(keys)]
    argv += ["--port", str(port), "--admin-port", str(admin), "--lame-duck", "0", "--workers", str(processes)]
    env = {ROUTER_CONFIG_ENV: config.to_json()}
    pid = stack.enter_context(started(argv, host=HOST, port=port, env=env))
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
    roles = ("prefill", "decode")
    urls = {role: [f"http://{one.host}:{one.port}" for one in engines if one.role == role] for role in roles}
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
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"http://{HOST}:{port}/v1/completions", _ASK, headers)
        try:
            # Its beginning is enough: slow engines take longer for the rest than anything here waits.
            with urllib.request.urlopen(request, timeout=5):  # noqa: S310 - a fixed loopback address
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise LoadFailed(f"the router on port {port} does not answer: {error}", "start it by hand") from None
            time.sleep(0.1)
