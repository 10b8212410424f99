"""The life of a local cluster: beside another one, found by its name, and gone without a trace however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.localcluster import cluster as clusters
from twinpool.localcluster.cluster import LocalCluster
from twinpool.localcluster.paths import state_dir
from twinpool.localcluster.processes import marked
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.toolchain import Binaries

pytestmark = pytest.mark.cluster

PAYLOAD = f"98765.{os.getpid()}"
"""An argument of sleep that no other process has."""


def command(*arguments: str, check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line of the local cluster."""
    line = [sys.executable, "-m", "twinpool.localcluster", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=check, timeout=120, **more)


def payloads() -> list[str]:
    """Return the processes that pods of this module started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if PAYLOAD in path.read_text().split("\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def is_gone(name: str) -> bool:
    """Say whether nothing of a cluster runs; an error tells what does."""
    if left := [*marked(str(state_dir(name))), *payloads()]:
        raise LookupError(f"{left} still run")
    return clusters.is_free(name)


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a cluster that is stopped after the test."""
    name = f"life-{os.getpid()}"
    yield name
    command("down", "--name", name)
    for path in state_dir(name).parent.glob(f"{name}*"):
        subprocess.run(["rm", "-r", path], check=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """A file with a single node."""
    file = tmp_path / "nodes.yaml"
    file.write_text("nodes: [{name: only, gpus: 2}]")
    return file


def run_payload(cluster: LocalCluster) -> None:
    """Run a pod whose process :func:`payloads` finds."""
    cluster.kubectl("run", "payload", "--image=tool:1", "--command", "--", "sleep", PAYLOAD)
    wait_until(payloads, 20, "the pod's process")


def test_a_second_cluster_is_independent_and_survives_the_death_of_its_supervisor(
    local_cluster: LocalCluster, name: str, nodes: Path, tmp_path: Path
) -> None:
    status = json.loads(command("up", "--name", name, "--nodes", str(nodes), "--detach", "-o", "json").stdout)
    second = LocalCluster.find(name)
    assert second.nodes == ("only",)
    assert local_cluster.nodes == ("node-a", "node-b")
    assert status["server"].split(":")[1] != local_cluster.status()["server"].split(":")[1], "an own address"
    run_payload(second)
    assert local_cluster.kubectl("get", "pods", "-o", "name").stdout == ""
    assert "pod/payload" in command("kubectl", "--name", name, "--", "get", "pods", "-o", "name").stdout
    assert command("kubeconfig", "--name", name).stdout.strip() == str(second.kubeconfig)
    assert "is ready at https://127." in command("status", "--name", name).stdout
    assert "127." in command("nodes", "--name", name).stdout

    again = command("up", "--name", name, "--nodes", str(nodes), check=False)
    assert again.returncode == 1
    assert f"error: cluster '{name}' runs already - use it" in again.stderr

    more = tmp_path / "images.json"
    more.write_text('{"tool:2": {"entrypoint": ["true"]}}')
    detached = command("up", "--name", name, "--detach", "--images", str(more))
    assert "runs already" in detached.stderr
    assert {"tool:2", "twinpool/router:dev"} <= set(LocalCluster.find(name).images)

    command("kill-node", "--name", name, "only")
    wait_until(lambda: not payloads(), 5, "the processes of the node are gone")
    assert "not running" in command("nodes", "--name", name).stdout
    command("start-node", "--name", name, "only")
    wait_until(payloads, 30, "the pod is started again")

    os.kill(status["pid"], signal.SIGKILL)
    wait_until(lambda: is_gone(name), 10, "no process is left after kill -9 of the supervisor")
    assert local_cluster.kubectl("get", "--raw", "/readyz").stdout == "ok"

    command("up", "--name", name, "--nodes", str(nodes), "--detach")
    third = LocalCluster.find(name)
    assert third.kubectl("get", "pods", "-o", "name").stdout == "", "nothing of the earlier cluster is left"
    command("down", "--name", name)
    assert is_gone(name)


def test_ctrl_c_ends_a_cluster_in_the_foreground(binaries: Binaries, name: str, nodes: Path) -> None:
    line = [sys.executable, "-m", "twinpool.localcluster", "up", "--name", name, "--nodes", str(nodes)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
        assert up.stdout
        lines = []
        while not (lines and lines[-1].startswith("# stop it with")):
            lines.append(up.stdout.readline())
            assert lines[-1], f"ended: {lines}"
        run_payload(LocalCluster.find(name))
        up.send_signal(signal.SIGINT)
        rest = up.stdout.read()
        assert up.wait(timeout=30) == 0
    assert "no process is left" in rest
    assert is_gone(name)


def test_a_lost_part_ends_the_cluster_with_its_reason(binaries: Binaries, name: str, nodes: Path) -> None:
    command("up", "--name", name, "--nodes", str(nodes), "--detach")
    found = LocalCluster.find(name)
    os.kill(found.status()["components"]["kube-scheduler"], signal.SIGKILL)
    wait_until(lambda: is_gone(name), 20, "the supervisor ends the rest")
    assert "error: kube-scheduler ended with -9" in state_dir(name).with_name(f"{name}.log").read_text()
    missing = command("kubeconfig", "--name", name, check=False)
    assert missing.returncode == 1
    assert f"error: no cluster '{name}' is running - start it with" in missing.stderr


def test_a_cluster_ends_with_the_process_that_uses_it(binaries: Binaries, name: str, nodes: Path) -> None:
    script = (
        "import pathlib, sys, time; from twinpool.localcluster.cluster import running\n"
        "with running(sys.argv[1], pathlib.Path(sys.argv[2])): print('up', flush=True); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", script, name, nodes], stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout
        assert user.stdout.readline() == "up\n"
        run_payload(LocalCluster.find(name))
        user.kill()
    wait_until(lambda: is_gone(name), 20, "no process is left after kill -9 of the user")
