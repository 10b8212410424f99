"""The launcher's I/O in small: what it reads from an engine, what it keeps of its output, who may hold it up."""

import http.server
import os
import socket
import threading
import types

import pytest

from twinpool.worker.logic.preflight import Result
from twinpool.worker.logic.report import Snapshot
from twinpool.worker.logic.supervisor import State
from twinpool.worker.shell import disk, endpoint, host, preflight, process
from twinpool.worker.shell.engine_client import EngineClient


@pytest.fixture
def engine():
    """An HTTP server that answers whatever the test puts into ``answers``; it keeps the requests' headers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            server.seen.append(dict(self.headers))
            code, body = server.answers
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.do_GET()

        def log_message(self, *args):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.answers, server.seen = (200, b""), []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def client(server, key=""):
    return EngineClient("127.0.0.1", server.server_address[1], "m", key)


@pytest.mark.parametrize(
    ("code", "body", "reason"),
    [
        (200, b'{"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": 1}}', ""),
        (200, b'{"choices": [{"finish_reason": "length"}]}', ""),
        (200, b'{"choices": [{"finish_reason": "abort"}]}', "finish_reason 'abort'"),
        (200, b'{"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": 0}}', "without a token"),
        (200, b'{"choices": []}', "no completion"),
        (200, b"[1]", "no completion"),
        (200, b"<html>", "no completion: <html>"),
        (500, b"boom", "HTTP 500: boom"),
    ],
)
def test_probe(engine, code, body, reason):
    engine.answers = (code, body)
    got = client(engine).probe(5.0, 3)
    assert (got.epoch, got.ok, got.late, got.aborted) == (3, not reason, False, "'abort'" in reason)
    assert (reason in got.reason) if reason else got.reason == ""


def test_every_data_parallel_rank_is_asked_for_a_token(engine):
    engine.answers = (200, b'{"choices": [{"finish_reason": "length"}]}')
    many = EngineClient("127.0.0.1", engine.server_address[1], "m", ranks=3)
    assert many.probe(5.0, 1).ok
    assert [seen["X-data-parallel-rank"] for seen in engine.seen] == ["0", "1", "2"]
    engine.seen.clear()
    engine.answers = (500, b"boom")
    assert not many.probe(5.0, 1).ok
    assert len(engine.seen) == 1


def test_a_probe_that_is_not_answered_is_late():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        got = EngineClient("127.0.0.1", silent.getsockname()[1], "m").probe(0.1, 1)
    assert (got.ok, got.late, got.reason) == (False, True, "no answer within 0.1 s")


def test_full_file_systems_are_named(tmp_path, monkeypatch):
    folders = disk.places({"HOME": str(tmp_path), "HF_HOME": str(tmp_path)})
    assert folders.count(str(tmp_path)) == 1
    assert disk.full((str(tmp_path), "/no/such/folder")) == ""
    real = os.statvfs(tmp_path)

    def shows(**changes):
        fake = {name: getattr(real, name) for name in dir(real) if name.startswith("f_")} | changes
        monkeypatch.setattr(os, "statvfs", lambda _: types.SimpleNamespace(**fake))
        return disk.full(("/x",))

    assert shows(f_bavail=256, f_frsize=4096, f_flag=0) == "/x has 1.0 MiB left"
    assert shows(f_bavail=256, f_frsize=4096, f_flag=os.ST_RDONLY) == ""
    assert shows(f_bavail=10**9, f_files=5, f_favail=0, f_flag=0) == "/x has no inodes left"


def test_health_and_metrics(engine):
    engine.answers = (200, b"vllm:x 1")
    assert client(engine).healthy()
    assert client(engine).metrics() == "vllm:x 1"
    engine.answers = (503, b"no")
    assert client(engine).healthy() is False
    assert client(engine).metrics() == ""


def test_an_api_key_of_the_environment_is_sent(engine):
    client(engine, "secret").healthy()
    assert engine.seen[0]["Authorization"] == "Bearer secret"


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    nobody = EngineClient("127.0.0.1", port, "m")
    assert nobody.healthy() is None
    assert nobody.metrics() == ""
    assert "ConnectionRefusedError" in nobody.probe(1.0, 1).reason


def test_tail_is_bounded_in_lines_and_length():
    tail = process.Tail()
    tail.feed(b"a" * 10 * process.LONGEST_LINE)
    tail.feed(b"b" * process.LONGEST_LINE + b"\n10%\r20%\r\n\n")
    tail.feed(b"line\n" * 2 * process.LAST_LINES + b"half \xff")
    lines = tail.lines()
    assert len(lines) == process.LAST_LINES + 1
    assert lines[-1] == "half \ufffd"
    tail = process.Tail()
    tail.feed(b"x" * 5 * process.LONGEST_LINE + b"\n10%\r20%\n")
    assert tail.lines() == ("x" * process.LONGEST_LINE, "10%", "20%")


@pytest.fixture
def served():
    snapshot = Snapshot(State(), "vllm", "m", "decode", "0.1.0")
    server = endpoint.Endpoint("127.0.0.1", 0, lambda: snapshot)
    yield server
    server.close()


def test_idle_connections_cannot_keep_the_kubelet_out_for_long(served, monkeypatch):
    """More connections than are served are closed at once, and those that say nothing end by themselves."""
    monkeypatch.setattr(endpoint._Handler, "timeout", 0.3)
    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(endpoint.MAX_CONNECTIONS + 4)]
    for each in idle:
        each.settimeout(2 * endpoint.CLIENT_TIMEOUT)
    try:
        assert [each.recv(1) for each in idle] == [b""] * len(idle), "the server ends each of them"
    finally:
        for each in idle:
            each.close()
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as other:
        other.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert other.recv(100).startswith(b"HTTP/1.0 200 OK")


@pytest.mark.parametrize(
    ("hear", "path", "length", "code"),
    [
        (None, "/group", 2, 404),
        (lambda body: (200, body.decode()), "/readyz", 2, 404),
        (lambda body: (200, body.decode()), "/group", 70000, 400),
        (lambda body: (200, body.decode()), "/group", "x", 400),
        (lambda body: (200, body.decode()), "/group", 2, 200),
    ],
)
def test_only_a_leader_hears_ranks(hear, path, length, code):
    server = endpoint.Endpoint("127.0.0.1", 0, lambda: Snapshot(State(), "vllm", "m", "decode", "1"), hear)
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as other:
            other.sendall(f"POST {path} HTTP/1.0\r\nContent-Length: {length}\r\n\r\n{{}}".encode())
            assert f" {code} " in other.recv(100).decode()
    finally:
        server.close()


def test_methods_other_than_get_are_refused(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=5) as other:
        other.sendall(b"PUT /readyz HTTP/1.0\r\n\r\n")
        assert b" 501 " in other.recv(100)


def test_ipv6_addresses_are_served():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    snapshot = Snapshot(State(), "vllm", "m", "decode", "0.1.0")
    try:
        server = endpoint.Endpoint("::1", 0, lambda: snapshot)
    except endpoint.PortTaken:
        pytest.skip("no IPv6 loopback here")
    with socket.create_connection(("::1", server.port), timeout=5) as other:
        other.sendall(b"GET /readyz HTTP/1.0\r\n\r\n")
        assert other.recv(100).startswith(b"HTTP/1.0 503")
    server.close()


def test_a_termination_message_goes_only_where_the_kubelet_waits_for_it(tmp_path, capsys):
    path = tmp_path / "log"
    host.write_termination_message("why", {host.TERMINATION_LOG_ENV: str(path)})
    assert path.read_text() == "why"
    host.write_termination_message("why", {host.TERMINATION_LOG_ENV: str(tmp_path)})
    assert "cannot write the termination message" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "outcome", "problem"),
    [
        ("exit 3", "unfinished", "rank 1 of pod p ended without a result"),
        ("exec sleep 60", "unfinished", "did not end within 0 s"),
        ("", "skipped", "cannot start"),
    ],
)
def test_a_preflight_whose_ranks_break_names_them_and_leaves_none(tmp_path, monkeypatch, program, outcome, problem):
    monkeypatch.setattr(preflight, "IMPORT_SECONDS", 0.2)
    python = tmp_path / "python"
    if program:
        python.write_text(f"#!/bin/sh\n{program}\n")
        python.chmod(0o755)
    plan = preflight.Plan(str(python), "p", 1, 1, 2, "127.0.0.1", 1, tmp_path / "r", meet=0.0, budget=0.0)
    found = preflight.measure(plan)
    assert (found.outcome, problem in found.problem) == (outcome, True), found.problem


def test_an_unfinished_preflight_starts_the_engine_and_a_failed_one_does_not(tmp_path, monkeypatch, capsys):
    plan = preflight.Plan("python", "p", 1, 1, 2, "127.0.0.1", 1, tmp_path / "r")
    started = []
    monkeypatch.setattr(os, "execvp", lambda _, argv: started.append(argv))
    for outcome in ("passed", "unfinished", "skipped", "failed"):
        monkeypatch.setattr(preflight, "measure", lambda _, o=outcome: Result(o, "why", warnings=("slow",)))
        preflight.run(plan, ["engine", outcome])
        assert Result.from_json(plan.result.read_text()).outcome == outcome
    assert [argv[1] for argv in started] == ["passed", "unfinished", "skipped"]
    assert "PreflightError: why" in capsys.readouterr().err
