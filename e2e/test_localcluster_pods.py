"""Pods on the local cluster: what they see, how they start, and what kubectl can do with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from twinpool.localcluster.cluster import Cluster

pytestmark = pytest.mark.cluster


def test_a_pod_runs_and_its_log_is_read(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl(
        "-n", namespace, "run", "hello", "--image=tool:1", "--restart=Never", "--command", "--", "echo", "hi"
    )
    wait_until(
        lambda: cluster.kubectl("-n", namespace, "logs", "hello").stdout == "hi\n", timeout=20, what="log of the pod"
    )
