"""The socket on which clients reach a router; it outlives the processes that accept from it."""

from __future__ import annotations

import socket

from twinpool.core.errors import InvalidValue

#: Connections that wait to be accepted.
BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """Open the listening socket for clients.

    Raises
    ------
    InvalidValue
        When the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by every connection: a client whose machine is gone must not keep a worker busy for ever.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InvalidValue(f"cannot listen on {host}:{port}: {error.strerror}", "change --host or --port") from None
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
