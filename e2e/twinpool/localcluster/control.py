"""The supervisor's socket: one JSON object per connection asks, one answers. Only the owner's processes reach it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import TYPE_CHECKING, Any

from twinpool.localcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SOCKET = "control.sock"
_MOST = 1 << 20
"""Longest request or answer, in bytes."""
_PATIENCE = 5.0
"""Seconds that the supervisor waits for the rest of a request: it serves one client at a time."""


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """Give the socket a path of few characters: Unix sockets allow 107, folders are longer."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{_SOCKET}"
    finally:
        os.close(descriptor)


def listen(folder: Path) -> socket.socket:
    """Return the listening socket of the cluster whose folder this is; the folder is its owner's only."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(folder) as path:
        server.bind(path)
    server.listen()
    server.setblocking(False)
    return server


def _read(connection: socket.socket) -> Any:
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(1 << 16)
        data += part
        if not part or len(data) > _MOST:
            raise ConnectionError("the message has no end")
    return json.loads(data)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Read a request in the supervisor.

    Raises
    ------
    OSError, ValueError
        There is none, or it is not an object.
    """
    connection.settimeout(_PATIENCE)
    request = _read(connection)
    if not isinstance(request, dict):
        raise ValueError("a request is an object")
    return request


def answer(connection: socket.socket, reply: dict[str, Any]) -> None:
    """Answer a request in the supervisor."""
    connection.sendall(json.dumps(reply).encode() + b"\n")


def ask(folder: Path, request: dict[str, Any], timeout: float = 30) -> dict[str, Any] | None:
    """Ask the supervisor of the cluster whose folder this is; None when there is none.

    Raises
    ------
    ClusterError
        The supervisor refuses, with its reason.
    """
    if not folder.is_dir():
        return None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, _short(folder) as path:
        connection.settimeout(timeout)
        try:
            connection.connect(path)
            connection.sendall(json.dumps(request).encode() + b"\n")
            reply = _read(connection)
        except TimeoutError as error:
            raise ClusterError(f"the supervisor in {folder} does not answer", "stop it with 'down'") from error
        except OSError:
            return None
    if "error" in reply:
        raise ClusterError(reply["error"], reply.get("remedy", ""))
    assert isinstance(reply, dict)
    return reply
