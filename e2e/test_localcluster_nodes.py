"""Nodes of the local cluster: drained within disruption budgets, killed, and switched on again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from twinpool.localcluster.errors import ClusterError
from twinpool.localcluster.processes import MARKER
from twinpool.localcluster.view import View
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import LocalCluster

pytestmark = pytest.mark.cluster

APP = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: app}
spec:
  replicas: 2
  selector: {matchLabels: {app: app}}
  template:
    metadata: {labels: {app: app}}
    spec:
      terminationGracePeriodSeconds: 1
      tolerations:
      - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 1}
      - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 1}
      topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: kubernetes.io/hostname
        whenUnsatisfiable: ScheduleAnyway
        labelSelector: {matchLabels: {app: app}}
      containers: [{name: main, image: "tool:1", command: [sleep, "1000"]}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: app}
spec: {minAvailable: 2, selector: {matchLabels: {app: app}}}
"""
RUNNING_ON = '{range .items[?(@.status.phase=="Running")]}{.spec.nodeName} {end}'
READY = '{.status.conditions[?(@.type=="Ready")].status}'


@pytest.fixture(scope="module")
def app(local_cluster: LocalCluster) -> Iterator[View]:
    """A Deployment with one pod per node and a budget that allows no disruption."""
    with local_cluster.fresh_namespace() as namespace:
        view = View(local_cluster, namespace)
        view.apply(APP)
        view.await_fields("deployment/app", "{.status.availableReplicas}", "2", 20)
        view.await_fields("pdb/app", "{.status.currentHealthy} {.status.disruptionsAllowed}", "2 0", 20)
        yield view


def test_nodes_are_as_described(local_cluster: LocalCluster) -> None:
    labels = "{.metadata.labels.topology\\.kubernetes\\.io/zone} {.metadata.labels.kubernetes\\.io/hostname}"
    path = labels + " {.status.allocatable.nvidia\\.com/gpu}"
    for letter in "ab":
        shown = local_cluster.kubectl("get", "node", f"node-{letter}", "-o", f"jsonpath={path}").stdout
        assert shown == f"zone-{letter} node-{letter} 8"
    with pytest.raises(ClusterError, match=r"no node 'node-z'.*node-a, node-b"):
        local_cluster.kill_node("node-z")


def test_a_drain_keeps_to_the_disruption_budget(app: View) -> None:
    drain = ("drain", "node-a", "--ignore-daemonsets", "--delete-emptydir-data", "--force")
    refused = app.cluster.kubectl(*drain, "--timeout=2s", check=False)
    assert refused.returncode == 1
    assert "violate the pod's disruption budget" in refused.stderr
    app.kubectl("patch", "pdb", "app", "--type=merge", "-p", '{"spec":{"minAvailable":1}}')
    app.cluster.kubectl(*drain, "--timeout=30s")
    app.await_fields("pods -l app=app", RUNNING_ON, "node-b node-b", 20)
    app.cluster.kubectl("uncordon", "node-a")


def test_a_dead_node_takes_its_processes_and_comes_back(app: View, local_cluster: LocalCluster) -> None:
    local_cluster.kill_node("node-b")
    try:
        assert local_cluster.status()["nodes"]["node-b"]["pid"] is None
        app.await_fields("node/node-b", READY, "Unknown", 30)
        app.await_fields("pods -l app=app --field-selector=spec.nodeName=node-a", RUNNING_ON, "node-a node-a", 30)
    finally:
        local_cluster.start_node("node-b")
    app.await_fields("node/node-b", READY, "True", 20)
    wait_until(lambda: app.read("pods -l app=app", RUNNING_ON) == "node-a node-a ", 30, "the lost pods are forgotten")


def test_a_restarted_node_starts_its_pods_again(local_cluster: LocalCluster, namespace: str) -> None:
    view = View(local_cluster, namespace)
    view.apply(
        "apiVersion: v1\nkind: Pod\nmetadata: {name: survivor}\nspec:\n  nodeName: node-a\n"
        '  containers: [{name: main, image: "tool:1", command: [sleep, "1000"]}]'
    )
    view.await_ready("survivor")
    local_cluster.kill_node("node-a")
    local_cluster.start_node("node-a")
    path = "{.status.containerStatuses[0].restartCount} {.status.containerStatuses[0].ready}"
    view.await_fields("pod/survivor", path, "1 true", 40)
    view.exec("survivor", "test", "-s", "/var/run/secrets/kubernetes.io/serviceaccount/token")
    shown = view.exec("survivor", "env").stdout
    assert MARKER not in shown, "containers get an environment of their own"
