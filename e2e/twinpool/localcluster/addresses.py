"""Loopback addresses of a cluster: an own second octet of 127.0.0.0/8, so that clusters beside each other never meet.

The claim on an octet is an abstract Unix socket. The kernel keeps those per network namespace, exactly as it keeps the
loopback addresses, and takes the claim back when the process ends, however it ends.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.localcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterable

FIRST_OCTET, LAST_OCTET = 64, 254
MOST_NODES = 200
"""Nodes of one cluster: node ``i`` has the pod network 127.octet.(i+1).0/24."""


@dataclass(frozen=True)
class Network:
    """Addresses of one cluster, all of them below 127.``octet``."""

    octet: int

    @property
    def control_plane(self) -> str:
        """Address of etcd and of the Kubernetes components."""
        return f"127.{self.octet}.0.1"

    def node(self, index: int) -> str:
        """Return the address of the node with this index, counted from 0."""
        return f"127.{self.octet}.0.{10 + index}"

    def pods(self, index: int) -> str:
        """Return the prefix of the pods of the node with this index, counted from 0."""
        return f"127.{self.octet}.{index + 1}.0/24"


class Claim:
    """A network that is this process's alone until :meth:`release` or its end."""

    def __init__(self, network: Network, lock: socket.socket) -> None:
        self.network = network
        self._lock = lock

    def release(self) -> None:
        """Give the network back."""
        self._lock.close()


def claim(octets: Iterable[int] = range(FIRST_OCTET, LAST_OCTET + 1)) -> Claim:
    """Claim the first free network.

    Raises
    ------
    ClusterError
        All networks are in use.
    """
    for octet in octets:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lock.bind(f"\0twinpool-localcluster-127.{octet}")
        except OSError as error:
            lock.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return Claim(Network(octet), lock)
    raise ClusterError(
        "every loopback network is in use by another local cluster",
        "stop one with 'python -m twinpool.localcluster down'",
    )


def free_ports(address: str, count: int) -> list[int]:
    """Return ``count`` different ports on which nothing listens at ``address``.

    Nobody else uses the addresses of a claimed network, so the ports stay free until they are used.
    """
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind((address, 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
