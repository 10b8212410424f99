"""Starts a server as a process of its own, waits until it answers, and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from typing import IO, TYPE_CHECKING

from twinpool.core.errors import TwinpoolError
from twinpool.localcluster.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class ServerFailed(TwinpoolError):
    """A server that a benchmark needs did not start."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free on ``host`` now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def started(
    argv: Sequence[str], *, host: str, port: int, env: Mapping[str, str] | None = None, within: float = 20.0
) -> Iterator[int]:
    """Run ``argv`` while the block runs and yield its process id, once ``host:port`` accepts connections.

    It ends with this process too, however that ends. For the main thread.

    Raises
    ------
    ServerFailed
        When the process ends early or does not listen ``within`` seconds; the message holds its last lines.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            list(argv),
            env={**os.environ, **(env or {})},
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        try:
            if not _listens(process, host, port, within):
                raise ServerFailed(f"{argv[0]} did not listen on {host}:{port}: {_tail(output)}", "run it by hand")
            yield process.pid
        finally:
            _end(process)


def _listens(process: subprocess.Popen[bytes], host: str, port: int, within: float) -> bool:
    deadline = time.monotonic() + within
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def _tail(output: IO[bytes]) -> str:
    output.seek(0)
    text = output.read().decode(errors="replace")
    return " | ".join(text.strip().splitlines()[-5:]) or "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue
        return
