"""The two controllers as processes: Twinpool's operator, and LWS's manager built from its sources."""

from __future__ import annotations

import base64
import contextlib
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bench.harness.server import free_port, started
from twinpool.core.errors import TwinpoolError
from twinpool.demo.client import get
from twinpool.localcluster.build import go_environment
from twinpool.localcluster.certificates import Authority
from twinpool.localcluster.golang import find_go
from twinpool.localcluster.paths import cache_dir
from twinpool.localcluster.progress import Progress
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import LocalCluster

SOURCES = "TWINPOOL_LWS"
_HOST = "127.0.0.1"
_ROOT = Path(__file__).resolve().parents[2]
#: Requests that change something. What a controller reads it gets from watches.
_WRITES = ("POST", "PUT", "PATCH", "DELETE")


class Controller:
    """A process that writes to the API server, and how much."""

    def __init__(self, pid: int, url: str, family: str, label: str, token: str = "") -> None:
        self.pid = pid
        self._url, self._family, self._label, self._token = url, family, label, token

    def writes(self) -> float:
        """Return the requests so far that change something, as the controller's own metrics count them."""
        request = urllib.request.Request(self._url, headers={"Authorization": f"Bearer {self._token}"})  # noqa: S310
        # Its certificate is its own, made at its start.
        tls = ssl._create_unverified_context() if self._url.startswith("https") else None  # noqa: S323
        with urllib.request.urlopen(request, timeout=30, context=tls) as answer:  # noqa: S310 - our own processes
            lines = answer.read().decode().splitlines()
        counted = [f'{self._label}="{verb}"' for verb in _WRITES]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith(f"{self._family}{{") and any(words in line for words in counted)
        )


@contextlib.contextmanager
def operator(cluster: LocalCluster, namespace: str) -> Iterator[Controller]:
    """Run Twinpool's operator for one namespace."""
    cluster.kubectl("apply", "--server-side", "-f", str(_ROOT / "crds"))
    port = free_port()
    command = [sys.executable, "-m", "twinpool.operator", f"--host={_HOST}", f"--port={port}"]
    command += [f"--namespace={namespace}", f"--lease-namespace={namespace}", "--log-level=warning"]
    with started(command, host=_HOST, port=port, env={"KUBECONFIG": str(cluster.kubeconfig)}) as pid:
        url = f"http://{_HOST}:{port}/metrics"
        wait_until(lambda: "twinpool_operator_leader 1.0" in get(url), 60, "the operator leads")
        wait_until(lambda: get(f"http://{_HOST}:{port}/readyz"), 60, "the operator's caches are complete")
        yield Controller(pid, url, "twinpool_operator_api_requests_total", "verb")


@contextlib.contextmanager
def manager(cluster: LocalCluster, namespace: str) -> Iterator[Controller]:
    """Run LWS's manager with its webhooks.

    Raises
    ------
    TwinpoolError
        When its sources are not there or do not build.
    """
    sources = Path(os.environ.get(SOURCES, ""))
    if not (sources / "cmd" / "main.go").is_file():
        raise TwinpoolError(
            "the sources of LWS are not there", f"check kubernetes-sigs/lws out and set {SOURCES} to the folder"
        )
    binary = _built(sources)
    for file in sorted((sources / "config" / "crd" / "bases").glob("*.yaml")):
        cluster.kubectl("apply", "--server-side", "-f", str(file))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port, hooks, health = free_port(), free_port(), free_port()
        authority = Authority(folder)
        authority.sign("tls", "webhooks", address=_HOST)
        _install_webhooks(cluster, sources, hooks, (folder / "ca.crt").read_bytes())
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(_configuration(folder, port, hooks, health)))
        command = [str(binary), f"--config={config}", "--zap-log-level=error"]
        with started(command, host=_HOST, port=hooks, env={"KUBECONFIG": str(cluster.kubeconfig)}, within=60) as pid:
            token = _token(cluster, namespace)
            yield Controller(pid, f"https://{_HOST}:{port}/metrics", "rest_client_requests_total", "method", token)


def _built(sources: Path) -> Path:
    binary = cache_dir() / "lws" / "manager"
    command = [str(find_go(Progress())), "build", "-o", str(binary), "./cmd"]
    done = subprocess.run(command, cwd=sources, env=go_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise TwinpoolError(f"LWS does not build: {done.stderr.strip()[-500:]}", f"run it by hand in {sources}")
    return binary


def _configuration(folder: Path, port: int, hooks: int, health: int) -> dict[str, Any]:
    return {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "metrics": {"bindAddress": f"{_HOST}:{port}"},
        "health": {"healthProbeBindAddress": f"{_HOST}:{health}"},
        "webhook": {"port": hooks, "host": _HOST, "certDir": str(folder)},
    }


def _install_webhooks(cluster: LocalCluster, sources: Path, port: int, authority: bytes) -> None:
    """Apply LWS's webhooks at an address instead of a Service; as it is installed, only its own pods pass them."""

    own = {"matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]}
    for body in yaml.safe_load_all((sources / "config" / "webhook" / "manifests.yaml").read_text()):
        for hook in body["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            bundle = base64.b64encode(authority).decode()
            hook["clientConfig"] = {"url": f"https://{_HOST}:{port}{path}", "caBundle": bundle}
            if path.endswith("-pod"):
                hook["objectSelector"] = own
        cluster.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump(body))


def _token(cluster: LocalCluster, namespace: str) -> str:
    """Return a token that may read the manager's metrics."""
    cluster.kubectl("-n", namespace, "create", "serviceaccount", "reader")
    rule = ("create", "clusterrole", "metrics-reader", "--verb=get", "--non-resource-url=/metrics")
    cluster.kubectl(*rule)
    account = f"--serviceaccount={namespace}:reader"
    cluster.kubectl("create", "clusterrolebinding", "metrics-reader", "--clusterrole=metrics-reader", account)
    return cluster.kubectl("-n", namespace, "create", "token", "reader").stdout.strip()
