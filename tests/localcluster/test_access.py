"""Certificates, kubeconfigs, folders and the control socket."""

from __future__ import annotations

import socket
import ssl
import threading
from typing import TYPE_CHECKING

import pytest
import yaml
from cryptography import x509

from twinpool.localcluster import control, paths
from twinpool.localcluster.access import Api, ready_nodes, write_kubeconfig
from twinpool.localcluster.certificates import Authority
from twinpool.localcluster.cluster import ExternalCluster
from twinpool.localcluster.errors import ClusterError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """An authority with a server and a client."""
    authority = Authority(tmp_path / "pki")
    authority.sign("server", "kube-apiserver", address="127.0.0.1")
    authority.sign("admin", "admin", group="system:masters")
    return authority


def test_keys_are_for_their_owner_only(authority: Authority) -> None:
    authority.key_pair("tokens")
    assert authority.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in authority.folder.iterdir()} == {0o600}
    assert {path.name for path in authority.folder.iterdir()} == {
        *("ca.crt", "server.crt", "server.key", "admin.crt", "admin.key", "tokens.key", "tokens.pub")
    }


def test_clients_are_known_by_name_and_group(authority: Authority) -> None:
    subject = x509.load_pem_x509_certificate(authority.path("admin.crt").read_bytes()).subject
    assert subject.rfc4514_string() == "CN=admin,O=system:masters"


def test_a_client_reaches_a_server_with_the_kubeconfig(authority: Authority, tmp_path: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.path("ca.crt")))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(authority.path("server.crt"), authority.path("server.key"))
    answers = [
        b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}',
        b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno",
        b"x",
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in answers:
                with context.wrap_socket(server.accept()[0], server_side=True) as connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        kubeconfig = tmp_path / "kubeconfig"
        write_kubeconfig(kubeconfig, f"https://127.0.0.1:{server.getsockname()[1]}", authority.folder, "admin")
        api = Api(kubeconfig)
        assert api.get("/") == {"a": 1}
        with pytest.raises(ClusterError, match="answers 403 to GET /x: no"):
            api.get("/x")
        with pytest.raises(OSError, match="x"):
            api.get("/")
        thread.join()
    assert kubeconfig.stat().st_mode & 0o777 == 0o600
    assert yaml.safe_load(kubeconfig.read_text())["current-context"] == "local"


def test_ready_nodes() -> None:
    def node(name: str, *conditions: tuple[str, str]) -> dict[str, object]:
        return {"metadata": {"name": name}, "status": {"conditions": [{"type": t, "status": s} for t, s in conditions]}}

    items = [node("a", ("Ready", "True")), node("b", ("Ready", "Unknown")), node("c", ("Other", "True"))]
    assert ready_nodes({"items": [*items, {"metadata": {"name": "d"}, "status": {}}]}) == {"a"}


def test_folders_follow_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path))
    assert paths.state_dir("a-1") == tmp_path / "state" / "a-1"
    monkeypatch.delenv("TWINPOOL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert paths.cache_dir() == tmp_path / "twinpool"
    for name in ("", "A", "../x", "a" * 41, "a-"):
        with pytest.raises(ClusterError, match="is not usable - use at most 40"):
            paths.state_dir(name)


def test_the_control_socket_asks_and_answers(tmp_path: Path) -> None:
    folder = tmp_path / ("long-" * 40)
    folder.mkdir()
    assert control.ask(folder, {}) is None
    assert control.ask(tmp_path / "none", {}) is None
    with control.listen(folder) as server:
        server.setblocking(True)

        def serve() -> None:
            for reply in ({"echo": True}, {"error": "no", "remedy": "ask nicely"}):
                with server.accept()[0] as connection:
                    assert control.receive(connection) == {"do": "x"}
                    control.answer(connection, reply)
            server.accept()[0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        assert control.ask(folder, {"do": "x"}) == {"echo": True}
        with pytest.raises(ClusterError, match="no - ask nicely"):
            control.ask(folder, {"do": "x"})
        assert control.ask(folder, {"do": "x"}) is None, "a supervisor that ends meanwhile is none"
        thread.join()
        with pytest.raises(ClusterError, match="does not answer - stop it"):
            control.ask(folder, {"do": "x"}, timeout=0.05)


@pytest.mark.parametrize("sent", [b"[]\n", b"x\n", b"{", b"x" * (1 << 21)])
def test_requests_that_are_none_are_refused(sent: bytes) -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        thread = threading.Thread(target=lambda: (writer.sendall(sent), writer.shutdown(socket.SHUT_WR)))
        thread.start()
        with pytest.raises((ValueError, OSError)):
            control.receive(reader)
        while reader.recv(1 << 20):
            pass
        thread.join()


def test_an_external_cluster_needs_a_kubeconfig_and_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(ClusterError, match="KUBECONFIG is not set - set it"):
        ExternalCluster.from_environment()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ClusterError, match="none is no file"):
        ExternalCluster.from_environment()
    (tmp_path / "none").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="kubectl is not on PATH - install"):
        ExternalCluster.from_environment()
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\nif [ "$1" = fail ]; then echo "sorry" >&2; exit 4; fi\necho "{}"')
    kubectl.chmod(0o755)
    cluster = ExternalCluster.from_environment()
    assert cluster.json("get", "pods") == {}
    with pytest.raises(ClusterError, match=r"kubectl fail failed \(4\): sorry"):
        cluster.kubectl("fail")
    assert cluster.kubectl("fail", check=False).returncode == 4
