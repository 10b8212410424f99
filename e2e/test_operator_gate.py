"""What the readiness gate is worth: one update while a router learns late, with the gate and with it forced open."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.load import Load
from twinpool.demo.scenario import condition, pods, pool
from twinpool.localcluster.images import SYSTEM_PATH, Image
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import Cluster, LocalCluster

pytestmark = pytest.mark.cluster

NAME, MODEL = "gated", "simulated-model"
IMAGE = "twinpool/router:behind-a-relay"


class Relay:
    """The API server behind a connection that a test holds up: what is said behind it arrives when it flows again."""

    def __init__(self, host: str, port: int) -> None:
        self._behind = (host, port)
        self._flows = threading.Event()
        self._flows.set()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    @contextlib.contextmanager
    def held_up(self) -> Iterator[None]:
        """Let nothing through for the time of a ``with`` block."""
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()

    def close(self) -> None:
        for end in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._behind)
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), name="relay", daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(local_cluster: LocalCluster, tmp_path: Path) -> Iterator[Relay]:
    """The way to the API server for routers of the image :data:`IMAGE`."""
    server = urlsplit(yaml.safe_load(local_cluster.kubeconfig.read_text())["clusters"][0]["cluster"]["server"])
    assert server.hostname
    assert server.port
    made = Relay(server.hostname, server.port)
    command, scripts = tmp_path / "twinpool-router", Path(sys.executable).absolute().parent
    # The API server's certificate is for this name too.
    reach = f"KUBERNETES_SERVICE_HOST=localhost KUBERNETES_SERVICE_PORT={made.port}"
    command.write_text(f'#!/bin/sh\n{reach} exec {scripts / command.name} "$@"\n')
    command.chmod(0o755)
    local_cluster.add_images({IMAGE: Image(env={"PATH": f"{tmp_path}:{scripts}:{SYSTEM_PATH}"})})
    yield made
    made.close()


class Gated:
    """A pool of one decode group whose router sees pods through the relay."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def apply(self, *args: str) -> None:
        router = {"podTemplate": {"spec": {"containers": [{"name": protocol.ROUTER_CONTAINER, "image": IMAGE}]}}}
        spec = {
            "model": {"name": MODEL},
            "engine": {"kind": "simulated", "args": ["--tokens-per-second=40", *args]},
            "decode": {"resources": {"gpu": {"perNode": 0}}, "drainTimeout": "2s"},
            "routing": router,
        }
        body = {"apiVersion": protocol.API_VERSION, "kind": protocol.KIND, "metadata": {"name": NAME}, "spec": spec}
        self.cluster.kubectl("-n", self.namespace, "apply", "-f", "-", input=yaml.safe_dump(body))

    def progress(self) -> Any:
        found = pool(self.cluster, self.namespace, NAME)
        said = condition(found, "Progressing")
        return said if said.get("observedGeneration") == found["metadata"]["generation"] else {}

    def groups(self) -> set[str]:
        """Return the groups that are to stay."""
        selector = f"{protocol.LABEL_POOL}={NAME}"
        found = self.cluster.json("-n", self.namespace, "get", "statefulset", "-l", selector)["items"]
        staying = [item for item in found if protocol.ANNOTATION_DRAINING not in item["metadata"]["annotations"]]
        return {item["metadata"]["name"] for item in staying}

    def await_settled(self) -> None:
        wait_until(lambda: self.progress().get("reason") == "Complete", 120, "the update is complete")

    def force_gates(self) -> None:
        """Open the gate of every pod whose containers are ready: what pods without a gate are like."""
        for pod in pods(self.cluster, self.namespace, NAME, "decode"):
            said = {item["type"]: item["status"] for item in pod["status"]["conditions"]}
            if said.get("ContainersReady") == "True" != said.get(protocol.ROUTABLE_GATE):
                opened = {"status": {"conditions": [{"type": protocol.ROUTABLE_GATE, "status": "True"}]}}
                patch = ("patch", "pod", pod["metadata"]["name"], "--subresource=status", "--patch", json.dumps(opened))
                self.cluster.kubectl("-n", self.namespace, *patch, check=False)


def test_an_update_loses_requests_when_its_gate_is_forced_and_none_otherwise(
    twinpool: Cluster, namespace: str, relay: Relay
) -> None:
    served = Gated(twinpool, namespace)
    served.apply()
    served.await_settled()
    old = served.groups()
    with Load(twinpool, namespace, NAME, MODEL, clients=2) as load:
        with relay.held_up():
            served.apply("--prefill-tokens-per-second=100000")
            waits = "has not admitted"
            wait_until(lambda: waits in served.progress().get("message", ""), 90, "the new group waits for the router")
            load.more(8)
            assert old < served.groups(), "the old group stays for as long as the router knows no other"
        served.await_settled()
        load.more(8)
    assert load.failures == [], f"{len(load.failures)} of {load.ended} failed"
    old = served.groups()
    with Load(twinpool, namespace, NAME, MODEL, clients=2) as load, relay.held_up():
        served.apply("--prefill-tokens-per-second=200000")
        wait_until(lambda: served.force_gates() or load.failures, 90, "requests fail")
        assert not old & served.groups(), "the one group that the router knew is on its way out"
