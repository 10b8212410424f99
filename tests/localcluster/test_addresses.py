"""Networks of clusters: claimed by one, free again after it, all of their own."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from twinpool.localcluster import addresses
from twinpool.localcluster.addresses import Network, claim, free_ports
from twinpool.localcluster.errors import ClusterError

OCTETS = (250, 251)


def test_two_claims_get_two_networks_and_release_gives_back() -> None:
    first, second = claim(OCTETS), claim(OCTETS)
    try:
        assert {first.network.octet, second.network.octet} == set(OCTETS)
        with pytest.raises(ClusterError, match="in use by another local cluster - stop one"):
            claim(OCTETS)
        first.release()
        third = claim(OCTETS)
        assert third.network == first.network
        third.release()
    finally:
        first.release()
        second.release()


def test_a_claim_ends_with_its_process() -> None:
    script = "import time; from twinpool.localcluster.addresses import claim; claim([252]); print('x', flush=True)"
    holder = "; c = claim([252]); print('x', flush=True); time.sleep(1000)"
    with subprocess.Popen(
        [sys.executable, "-c", script.split("; claim")[0] + holder], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"x\n"
        with pytest.raises(ClusterError):
            claim([252])
        process.kill()
    claim([252]).release()


def test_addresses_of_nodes_and_pods_never_overlap() -> None:
    network = Network(99)
    assert network.control_plane == "127.99.0.1"
    nodes = [network.node(i) for i in range(addresses.MOST_NODES)]
    assert len({*nodes, network.control_plane}) == addresses.MOST_NODES + 1
    assert nodes[-1] == "127.99.0.209"
    assert network.pods(0) == "127.99.1.0/24"
    assert network.pods(addresses.MOST_NODES - 1) == "127.99.200.0/24"


def test_free_ports_differ_and_avoid_what_listens_everywhere() -> None:
    with socket.socket() as everywhere:
        everywhere.bind(("0.0.0.0", 0))
        everywhere.listen()
        ports = free_ports("127.99.0.1", 20)
        assert len(set(ports)) == 20
        assert everywhere.getsockname()[1] not in ports
