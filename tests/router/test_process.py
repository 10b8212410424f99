"""The whole program: its processes, its admin port, its end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import resource
import signal
import socket
import sys
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from twinpool.core.errors import InvalidValue
from twinpool.core.protocol import ROUTER_CONFIG_ENV, RouterConfig
from twinpool.router.__main__ import main, parser, settings

CONFIG = RouterConfig("p", "n", ("m",), drain_timeout=20.0)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Program:
    """``twinpool-router`` as a process."""

    def __init__(self, endpoints, kit):
        self.endpoints = endpoints
        self.kit = kit
        self.port, self.admin_port = free_port(), free_port()
        self.process = None
        self.clients = []

    async def start(self, *flags, config=CONFIG):
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "twinpool.router", "--port", str(self.port), "--admin-port", str(self.admin_port),
            "--endpoints", str(self.endpoints), "--lame-duck", "0.3", *flags,
            env={**os.environ, ROUTER_CONFIG_ENV: config.to_json(), "POD_IP": "127.0.0.1"},
        )  # fmt: skip

    async def page(self, path, method="GET"):
        reader, writer = await asyncio.open_connection("127.0.0.1", self.admin_port)
        client = self.kit.RawClient(reader, writer)
        client.send(f"{method} {path} HTTP/1.1\r\nHost: r\r\n\r\n".encode())
        answer = await client.answer()
        client.close()
        return answer

    async def wait_for(self, path, test):
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    answer = await self.page(path)
                    if test(answer):
                        return answer
                await asyncio.sleep(0.02)

    async def connect(self):
        client = self.kit.RawClient(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    async def metric(self, name):
        text = (await self.page("/metrics")).body.decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(found.group(1)) if found else None

    def children(self):
        pid = self.process.pid
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    async def stop(self):
        for client in self.clients:
            client.abort()
        await asyncio.sleep(0)
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@pytest.fixture
async def program(kit, tmp_path):
    engines = [kit.Engine("prefill", "p0"), kit.Engine("decode", "d0")]
    for engine in engines:
        await engine.start()
    path = tmp_path / "workers.json"
    path.write_text(json.dumps([{"role": e.role, "host": "127.0.0.1", "port": e.port} for e in engines]))
    program = Program(path, kit)
    program.engines = engines
    yield program
    await program.stop()
    for engine in engines:
        await engine.stop()


async def ready(program):
    await program.wait_for("/ready", lambda a: a.status == 200)
    await program.wait_for("/admin/endpoints", lambda a: all(e["admitted"] for e in a.json["endpoints"]))


async def test_from_start_to_drain(program, kit):
    await program.start("--workers", "2")
    await ready(program)
    client = await program.connect()
    client.send(kit.post(kit.STREAM))
    assert (await client.answer()).body == b"".join(kit.EVENTS)
    assert await program.metric('twinpool_router_handoffs_total{outcome="remote",reason=""}') == 1
    work = (await program.page("/admin/work")).json
    assert work["kvTokens"] == 0, "this engine does not say what it has room for"
    assert work["current"] is True
    assert (work["arrivals"]["requests"], work["waiting"], work["decoding"]) == (1, 0, 0)
    assert work["arrivals"]["prefill"] > 0
    assert (await program.page("/health")).status == 200
    assert (await program.page("/nothing")).status == 404
    assert (await program.page("/ready", "POST")).status == 405
    decode = program.engines[1]
    decode.script = kit.hang
    client.send(kit.post(kit.STREAM))
    await kit.until(lambda: sum(request.method == "POST" for request in decode.requests) == 2)
    entry = next(e for e in (await program.page("/admin/endpoints")).json["endpoints"] if e["role"] == "decode")
    assert entry["inFlight"] == 1
    assert entry["tokensInFlight"] > 0
    entry = next(e for e in (await program.page("/admin/endpoints")).json["endpoints"] if e["role"] == "prefill")
    assert (entry["inFlight"], entry["unpulledHandoffs"]) == (0, 1)
    books = (await program.page("/admin/ledger")).json
    assert books["current"]
    assert sorted(
        (load["inFlight"], load["unpulledHandoffs"]) for one in books["processes"] for load in one.values()
    ) == [
        (0, 1),
        (1, 0),
    ]
    assert 900 < entry["cachedTokensUsed"] <= 1000, "two prompts, each with 500 cached tokens, fading"

    program.process.send_signal(signal.SIGTERM)
    await program.wait_for("/ready", lambda a: a.status == 503 and a.json["reason"] == "draining")
    # New connections are still taken for a while, for one request each once the data processes have heard of it.
    last = ""
    while last != "close":
        late = await program.connect()
        late.send(b"GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n")
        answer = await late.answer()
        assert answer.status == 200
        last = answer.headers.get("connection")
        late.close()
    with pytest.raises(ConnectionError):  # noqa: PT012 - after a while they are not
        while True:
            (await program.connect()).close()
            await asyncio.sleep(0.02)
    decode.release.set()
    answer = await client.answer()
    assert (answer.status, answer.body) == (200, b"".join(kit.EVENTS))
    assert await asyncio.wait_for(program.process.wait(), 10) == 0
    client.close()


async def test_routers_hear_of_each_others_work_and_outlive_each_other(program, kit):
    other = Program(program.endpoints, kit)
    try:
        await program.start("--workers", "2", "--copy", f"127.0.0.1:{other.admin_port}")
        await other.start("--copy", f"127.0.0.1:{program.admin_port}")
        await ready(program)
        await ready(other)
        decode = program.engines[1]
        decode.script = kit.hang
        client = await program.connect()
        client.send(kit.post(kit.STREAM))

        def copies(of):
            return lambda answer: [(c["heard"], c["requests"]) for c in answer.json["copies"]] == of

        await other.wait_for("/admin/ledger", copies([(True, 1)]))
        await program.wait_for("/admin/ledger", copies([(True, 0)]))
        program.process.kill()
        await program.process.wait()
        await other.wait_for("/admin/ledger", copies([(False, None)]))
        decode.script = kit.answer_normally
        client = await other.connect()
        client.send(kit.post(kit.STREAM))
        assert (await client.answer()).body == b"".join(kit.EVENTS)
    finally:
        await other.stop()


async def test_debug_shows_what_a_router_is_at_and_its_last_choices(program, kit):
    await program.start("--workers", "2")
    await ready(program)
    state = (await program.page("/debug")).json
    assert (state["pool"], state["policy"], len(state["config"])) == (CONFIG.pool, CONFIG.policy, 12)
    assert set(state["versions"]) == {"twinpool", "python"}
    control = state["control"]
    assert (control["synced"], control["stopping"], control["endpoints"], control["admitted"]) == (True, False, 2, 2)
    assert sum(control["process"]["tasks"].values()) >= 6
    assert {one["process"]["pid"] for one in state["processes"]} == set(program.children())
    for one in state["processes"]:
        assert (one["running"], one["waiting"], one["draining"], one["prefillWorkers"]) == (0, 0, False, 1)
        assert set(one["process"]["lag"]) == {"lastMs", "worstMs"}
        assert one["process"]["peakMemoryBytes"] > 2**20
    unknown = {"recording": False, "decisions": []}
    assert (await program.page("/debug/decisions")).json == {"processes": [unknown, unknown]}, "nothing was kept so far"
    client = await program.connect()
    client.send(kit.post(kit.STREAM))
    await client.answer()
    kept = (await program.page("/debug/decisions")).json["processes"]
    assert [one["recording"] for one in kept] == [True, True]
    assert [d["choice"] for one in kept for d in one["decisions"]] == ["prefill", "decode"]
    names = {e["role"]: e["name"] for e in (await program.page("/admin/endpoints")).json["endpoints"]}
    assert [d["chosen"] for one in kept for d in one["decisions"]] == [names["prefill"], names["decode"]]
    assert "idleConnections" in state["processes"][0]
    # A process that does not answer is named as such; the others are shown.
    stopped = program.children()[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        some = (await program.page("/debug")).json["processes"]
        assert sorted(one is None for one in some) == [False, True]
        assert None in (await program.page("/debug/decisions")).json["processes"]
    finally:
        os.kill(stopped, signal.SIGCONT)
    client.send(b"GET /debug HTTP/1.1\r\nHost: r\r\n\r\n")
    assert (await client.answer()).status == 404, "clients cannot reach it"


async def test_a_dead_data_process_is_replaced_and_its_counts_stay(program, kit):
    await program.start()
    await ready(program)
    client = await program.connect()
    client.send(kit.post(kit.STREAM))
    await client.answer()
    count = 'twinpool_router_requests_total{route="/v1/completions",code="200"}'
    assert await program.metric(count) == 1
    (child,) = program.children()
    os.kill(child, signal.SIGKILL)
    assert await client.rest() == b""
    client.close()
    # The listener was never closed: this connection waits in its queue for the next process.
    client = await program.connect()
    client.send(kit.post(kit.STREAM))
    assert (await client.answer()).status == 200
    client.close()
    assert program.children() != [child]
    assert await program.metric(count) == 2
    assert await program.metric("twinpool_router_data_process_restarts_total") == 1


async def test_data_processes_end_with_their_parent(program, kit):
    await program.start("--workers", "2")
    await ready(program)
    children = program.children()
    program.process.kill()
    await program.process.wait()
    await kit.until(lambda: not any(Path(f"/proc/{c}/cmdline").exists() for c in children))


async def test_a_worker_that_goes_is_taken_out_and_comes_back(program, kit):
    await program.start()
    await ready(program)
    decode = program.engines[1]
    await decode.stop()
    await program.wait_for("/admin/endpoints", lambda a: not a.json["endpoints"][1]["admitted"])
    client = await program.connect()
    client.send(kit.post(kit.STREAM))
    answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (503, "no_worker")
    await decode.start()
    await ready(program)
    client.send(kit.post(kit.STREAM))
    assert (await client.answer()).status == 200
    client.close()
    ids = [e["id"] for e in (await program.page("/admin/endpoints")).json["endpoints"]]
    assert [identity.partition("+")[2] for identity in ids] == ["", "1"], "it is another engine now"


async def test_keys_are_taken_up_while_it_runs(program, kit, tmp_path):
    keys = tmp_path / "keys"
    keys.mkdir()
    await program.start("--workers", "2", "--api-keys", str(keys))
    await ready(program)

    async def answered_with(wanted):
        async with asyncio.timeout(30):
            while True:
                client = await program.connect()
                client.send(kit.post(kit.STREAM, headers=f"Authorization: Bearer {'k' * 32}\r\n"))
                found = (await client.answer()).status
                client.close()
                if found == wanted:
                    return
                await asyncio.sleep(0.05)

    await answered_with(401)
    (keys / "team-a").write_text("k" * 32)
    await answered_with(200)
    (keys / "team-a").unlink()
    await answered_with(401)


async def test_a_certificate_that_is_none_is_said_in_one_line(program, tmp_path):
    program.process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "twinpool.router", "--port", str(program.port), "--admin-port", str(program.admin_port),
        "--endpoints", str(program.endpoints), "--model", "m", "--tls", str(tmp_path), stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await asyncio.wait_for(program.process.communicate(), 20)
    assert program.process.returncode == 2
    assert b"kubernetes.io/tls" in said
    assert b"Traceback" not in said


async def test_an_endpoint_list_that_cannot_be_read_is_said_in_one_line(program):
    program.endpoints.unlink()
    program.process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "twinpool.router", "--port", str(program.port), "--admin-port", str(program.admin_port),
        "--endpoints", str(program.endpoints), "--model", "m", stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, said = await asyncio.wait_for(program.process.communicate(), 20)
    assert program.process.returncode == 2
    assert b"create it, or leave --endpoints away" in said
    assert b"Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        ([], {}, "TWINPOOL_ROUTER is not set"),
        ([], {ROUTER_CONFIG_ENV: "{"}, "is not JSON"),
        (["--workers", "0"], {ROUTER_CONFIG_ENV: CONFIG.to_json()}, "--workers is 0"),
        (["--lame-duck", "-1"], {ROUTER_CONFIG_ENV: CONFIG.to_json()}, "must be positive"),
    ],
)
def test_wrong_settings_are_refused_in_words(flags, environment, words):
    with pytest.raises(InvalidValue, match=re.escape(words)):
        settings(parser(environment).parse_args(flags), environment)


async def test_few_open_files_at_the_start_are_raised_to_what_is_allowed(program, kit):
    """Container runtimes allow 1024 at first; half as many streams would be the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        await program.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await ready(program)
    (child,) = program.children()
    assert resource.prlimit(child, resource.RLIMIT_NOFILE) == (hard, hard)


def test_flags_and_environment():
    environment = {ROUTER_CONFIG_ENV: CONFIG.to_json(), "POD_IP": "127.1.2.3"}
    chosen = settings(parser(environment).parse_args(["--policy", "random", "--model", "x"]), environment)
    assert (chosen.host, chosen.port, chosen.admin_port) == ("127.1.2.3", 8000, 8081)
    assert (chosen.config.policy, chosen.config.models, chosen.config.pool) == ("random", ("x",), "p")
    many = dataclasses.replace(CONFIG, processes=3)
    assert settings(parser({}).parse_args([]), {ROUTER_CONFIG_ENV: many.to_json()}).workers == 3
    assert settings(parser({}).parse_args(["--workers", "2"]), {ROUTER_CONFIG_ENV: many.to_json()}).workers == 2
    static = settings(parser({}).parse_args(["--endpoints", "f", "--model", "x"]), {})
    assert (static.config.models, static.endpoints, static.host) == (("x",), "f", "127.0.0.1")


def test_a_taken_port_is_said_in_one_line(capsys, tmp_path):
    path = tmp_path / "f"
    path.write_text("[]")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        taken = str(sock.getsockname()[1])
        other = str(free_port())
        base = ["--endpoints", str(path), "--model", "m"]
        assert main([*base, "--port", taken]) == 2
        assert "change --host or --port" in capsys.readouterr().err
        assert main([*base, "--port", other, "--admin-port", taken]) == 2
        assert "give another --admin-port" in capsys.readouterr().err


async def test_a_collector_receives_the_spans_of_a_router_that_ends(program, kit):
    received = []

    async def take(request):
        received.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response(body=b"", content_type="application/x-protobuf")

    application = web.Application()
    application.router.add_post("/v1/traces", take)
    async with TestServer(application) as collector:
        url = str(collector.make_url("/v1/traces"))
        await program.start(config=dataclasses.replace(CONFIG, tracing_url=url, tracing_sampling=1.0))
        await ready(program)
        client = await program.connect()
        client.send(kit.post(kit.STREAM))
        await client.answer()
        client.close()
        program.process.terminate()
        await asyncio.wait_for(program.process.wait(), 30)
    # One batch or two, as the exporter's clock falls.
    resources = [found for batch in received for found in batch.resource_spans]
    for found in resources:
        labels = {entry.key: entry.value.string_value for entry in found.resource.attributes}
        assert (labels["service.name"], labels["twinpool.pool"]) == ("twinpool-router", "p")
    names = {span.name for found in resources for scope in found.scope_spans for span in scope.spans}
    assert names == {"POST /v1/completions", "queue", "prefill", "decode"}
