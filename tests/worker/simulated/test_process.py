"""The engine as a process of its own: starts that fail, ports, signals, sudden death."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time

import pytest


@contextlib.contextmanager
def process(*argv):
    command = [sys.executable, "-m", "twinpool.worker.engines.simulated.server", "--model", "m", *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.93.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def connected(port, within=20.0):
    """Connect once the engine listens."""
    deadline = time.monotonic() + within
    while True:
        connection = http.client.HTTPConnection("127.93.0.1", port, timeout=10)
        try:
            connection.connect()
        except ConnectionError:
            assert time.monotonic() < deadline, "it never listened"
            time.sleep(0.05)
        else:
            break
    with contextlib.closing(connection):
        yield connection


def stream(connection, headers=None, **fields):
    body = {"model": "m", "prompt": "hi", "stream": True, "ignore_eos": True, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), headers or {})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: {")
    return response


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("crash-at-start", 1, "RuntimeError: this crash was asked for"),
        ("oom-at-load", -signal.SIGKILL, "torch.OutOfMemoryError: CUDA out of memory"),
        ("model-missing", 1, "OSError: m is not a local folder"),
        ("nonsense", 1, "InvalidValue: 'nonsense' is not a fault"),
    ],
)
def test_a_start_that_fails_says_so_and_ends(fault, code, says):
    with process("--fault", fault) as running:
        assert says in running.stderr.read()
        assert running.wait(10) == code


def test_a_port_in_use_is_named():
    with socket.create_server(("127.93.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with process("--host", "127.93.0.1", "--port", str(port)) as running:
            assert f"127.93.0.1:{port}: address already in use" in running.stderr.read()
            assert running.wait(10) == 1


def test_an_address_that_is_not_here_is_named():
    with process("--host", "192.0.2.1") as running:
        assert "cannot listen on 192.0.2.1:8000" in running.stderr.read()


def test_sigterm_cuts_streams_by_default(port):
    with process("--host", "127.93.0.1", "--port", str(port), "--tokens-per-second", "20") as running:
        with connected(port) as connection:
            response = stream(connection, max_tokens=5000)
            running.send_signal(signal.SIGTERM)
            rest = response.read()
        assert b'"finish_reason":"abort"' in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert running.wait(10) == 0


def test_sigterm_lets_streams_end_within_the_shutdown_timeout(port):
    argv = ("--tokens-per-second", "40", "--shutdown-timeout", "20")
    with process("--host", "127.93.0.1", "--port", str(port), *argv) as running:
        with connected(port) as connection:
            response = stream(connection, max_tokens=20)
            running.send_signal(signal.SIGTERM)
            rest = response.read()
        assert b'"finish_reason":"length"' in rest
        assert running.wait(10) == 0


def test_an_engine_can_die_in_the_middle_of_an_answer(port):
    with process("--host", "127.93.0.1", "--port", str(port)) as running:
        with connected(port) as connection:
            response = stream(connection, {"x-twinpool-fault": "die-mid-stream=3"}, max_tokens=50)
            with pytest.raises((http.client.HTTPException, ConnectionError, ValueError)):
                response.read()
        assert running.wait(10) == -signal.SIGKILL
