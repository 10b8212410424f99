"""``twinpool live`` beside a pool under load: the page's numbers are the pool's."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import protocol
from twinpool.demo import scenario
from twinpool.demo.client import get
from twinpool.demo.load import Load
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import Cluster

pytestmark = pytest.mark.cluster
SIMULATED = scenario.CHOICES["simulated"]


@contextlib.contextmanager
def live(cluster: Cluster, namespace: str, pool: str) -> Iterator[str]:
    """Run the command and give the page's address."""
    tools = f"{Path(cluster.kubectl_path).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": tools}
    command = [sys.executable, "-m", "twinpool.cli", "live", pool, "--namespace", namespace, "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line, line
        yield line.split()[2]
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_the_page_shows_the_requests_of_a_pool(twinpool: Cluster, namespace: str) -> None:
    twinpool.kubectl("-n", namespace, "apply", "-f", str(SIMULATED.manifest))
    ready = (f"{protocol.PLURAL}.{protocol.GROUP}/{SIMULATED.pool}", "--for=condition=Ready", "--timeout=120s")
    twinpool.kubectl("-n", namespace, "wait", *ready, timeout=130)
    with live(twinpool, namespace, SIMULATED.pool) as url, Load(twinpool, namespace, SIMULATED.pool, SIMULATED.model):

        def frame() -> dict[str, Any]:
            seen = json.loads(get(f"{url}/frame"))
            assert not seen["problem"]
            found: dict[str, Any] = seen["frame"]
            return found

        def moving() -> bool:
            numbers = frame()["numbers"]
            counted = all(numbers[name] for name in ("requests", "remote", "tokens", "bytes", "clients"))
            timed = None not in (*numbers["ttft"], *numbers["itl"], *numbers["prefill"])
            return counted and timed and any(group["requests"] for group in frame()["groups"])

        wait_until(moving, 60, "requests, tokens, bytes and times are counted")
        seen = frame()
    assert (seen["ready"], seen["ratio"], seen["simulated"], seen["silent"]) == (True, "1:1", True, [])
    assert {group["role"]: group["state"] for group in seen["groups"]} == {"prefill": "serving", "decode": "serving"}
    assert seen["numbers"]["failed"] == 0


def test_a_pool_that_is_not_there_ends_the_command(
    twinpool: Cluster, namespace: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError), live(twinpool, namespace, "nobody"):
        pass
    assert "nobody" in capfd.readouterr().err
