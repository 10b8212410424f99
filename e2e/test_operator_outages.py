"""The operator when processes around it stop: its leader frozen, the API server away, its own namespace deleted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.demo.load import Load
from twinpool.demo.scenario import ROOT
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twinpool.localcluster.cluster import Cluster, LocalCluster

pytestmark = pytest.mark.cluster

PREFIX = "serving.twinpool.dev"
NAME = "frozen"


def manifest(decode: int = 1, prefill: int = 1, drain: str = "2s") -> str:
    role = {"resources": {"gpu": {"perNode": 0}}, "drainTimeout": drain}
    roles = {"prefill": {**role, "replicas": prefill}, "decode": {**role, "replicas": decode}}
    engine = {"kind": "simulated", "args": ["--tokens-per-second=60"]}
    spec = {"model": {"name": "tiny"}, "engine": engine, **roles}
    body = {"apiVersion": f"{PREFIX}/v1alpha1", "kind": "InferencePool", "metadata": {"name": NAME}, "spec": spec}
    text: str = yaml.safe_dump(body)
    return text


class OperatorProcess:
    """An operator as a process that a test may freeze, for one namespace or (empty) all."""

    def __init__(self, cluster: Cluster, lease_namespace: str, namespace: str, kubeconfig: str = "") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "twinpool.operator", "--host=127.0.0.1", f"--port={self.port}"]
        command += [
            f"--namespace={namespace}",
            f"--lease-namespace={lease_namespace}",
            "--lease-name=twinpool-operator",
        ]
        environment = {**os.environ, "KUBECONFIG": kubeconfig or str(cluster.kubeconfig)}
        self.process = subprocess.Popen(command, env=environment)

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body, 0 while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def leads(self) -> bool:
        return "twinpool_operator_leader 1.0" in self.get("/metrics")[1]

    def actions(self) -> dict[str, float]:
        """Return how often each action was carried out."""
        lines = [
            line for line in self.get("/metrics")[1].splitlines() if line.startswith("twinpool_operator_actions_to")
        ]
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@pytest.fixture(scope="module")
def unattended(twinpool: Cluster) -> Iterator[Cluster]:
    """The cluster with Twinpool's CRD and without its operator, which comes back afterwards."""
    deployment = ("-n", "twinpool-system", "scale", "deployment/twinpool-operator")
    twinpool.kubectl(*deployment, "--replicas=0")
    twinpool.kubectl("-n", "twinpool-system", "wait", "--for=delete", "pod", "--all", "--timeout=50s")
    yield twinpool
    twinpool.kubectl(*deployment, "--replicas=1")
    available = ("wait", "--for=condition=Available", "deployment/twinpool-operator", "--timeout=60s")
    twinpool.kubectl("-n", "twinpool-system", *available, timeout=70)


@pytest.fixture
def start(unattended: Cluster, namespace: str) -> Iterator[Callable[..., OperatorProcess]]:
    """Start operators; all are gone afterwards, frozen ones too."""
    started: list[OperatorProcess] = []

    def begin(scope: str | None = None, kubeconfig: str = "") -> OperatorProcess:
        started.append(OperatorProcess(unattended, namespace, namespace if scope is None else scope, kubeconfig))
        return started[-1]

    yield begin
    for operator in started:
        operator.signal(signal.SIGKILL)
        operator.process.wait(30)


class Pool:
    """A pool in the test's namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments, **options).stdout

    def apply(self, text: str) -> None:
        self.kubectl("apply", "-f", "-", input=text)

    def sets(self) -> dict[str, str]:
        """Return the groups that are meant to stay, by name, with their role."""
        items = self.cluster.json("-n", self.namespace, "get", "statefulsets")["items"]
        staying = [item["metadata"] for item in items if f"{PREFIX}/retired" not in item["metadata"]["annotations"]]
        return {metadata["name"]: metadata["labels"][f"{PREFIX}/role"] for metadata in staying}

    def all_sets(self) -> int:
        """Return how many StatefulSets there are, those that are on their way out included."""
        return len(self.cluster.json("-n", self.namespace, "get", "statefulsets")["items"])

    def settled(self, prefill: int, decode: int) -> bool:
        roles = sorted(self.sets().values())
        found = self.cluster.json("-n", self.namespace, "get", "tpool", "-o", "json")["items"][0].get("status", {})
        summaries = [found.get(role, {}).get("summary") for role in ("prefill", "decode", "router")]
        wanted = [f"{prefill}/{prefill}", f"{decode}/{decode}", "1/1"]
        return roles == ["decode"] * decode + ["prefill"] * prefill and summaries == wanted

    def await_settled(self, prefill: int, decode: int, seconds: float = 120) -> None:
        wait_until(lambda: self.settled(prefill, decode), seconds, f"{prefill} prefill and {decode} decode groups")


@pytest.fixture
def pool(unattended: Cluster, namespace: str) -> Pool:
    return Pool(unattended, namespace)


def test_a_leader_that_was_frozen_undoes_and_duplicates_nothing_and_no_request_fails(
    pool: Pool, start: Callable[..., OperatorProcess]
) -> None:
    frozen = start()
    wait_until(frozen.leads, 60, "the first one leads")
    pool.apply(manifest(decode=1, drain="30s"))
    pool.await_settled(1, 1)
    follower = start()
    wait_until(lambda: follower.get("/readyz")[0] == 200, 60, "the second one is ready")
    with Load(pool.cluster, pool.namespace, NAME, "tiny", clients=2) as load:
        # Frozen in the middle of a change: it has planned from what it saw, and some of its writes are on their way.
        pool.apply(manifest(decode=3, drain="30s"))
        wait_until(lambda: len(pool.sets()) > 2, 30, "the change has begun", interval=0.005)
        frozen.signal(signal.SIGSTOP)
        wait_until(follower.leads, 40, "the second one leads", interval=0.1)
        pool.await_settled(1, 3)
        pool.apply(manifest(decode=1, prefill=2, drain="30s"))
        pool.await_settled(2, 1)
        thawed_leader_changes_nothing(pool, frozen, follower)
        load.more(8)
    assert load.failures == [], f"{len(load.failures)} of {load.ended} failed"
    # And it is still of use: the other one goes, it takes over with a view that is up to date.
    follower.signal(signal.SIGTERM)
    wait_until(frozen.leads, 20, "the first one leads again")
    pool.apply(manifest(decode=2, prefill=1))
    pool.await_settled(1, 2)


def thawed_leader_changes_nothing(pool: Pool, frozen: OperatorProcess, follower: OperatorProcess) -> None:
    """Continue the frozen leader once the new one has nothing left to do, and see that it does nothing."""
    pool.kubectl("delete", "service", f"{NAME}-router")
    wait_until(lambda: pool.kubectl("get", "service", f"{NAME}-router", check=False), 30, "the Service is back")
    # Two groups go: drained, scaled to 0, deleted. Until that is done the new leader has work of its own.
    wait_until(lambda: pool.all_sets() == 3, 60, "the groups that went are gone")
    groups, service = pool.sets(), pool.kubectl("get", "service", f"{NAME}-router", "-o", "jsonpath={.metadata.uid}")
    before = follower.actions()
    frozen.signal(signal.SIGCONT)
    wait_until(lambda: frozen.get("/readyz")[0] == 200 and not frozen.leads(), 30, "the first one knows that it lost")
    end = time.monotonic() + 10
    wait_until(lambda: time.monotonic() > end or pool.sets() != groups, 20, "ten seconds or a change", interval=0.2)
    assert pool.sets() == groups
    assert pool.kubectl("get", "service", f"{NAME}-router", "-o", "jsonpath={.metadata.uid}") == service
    assert follower.actions() == before, "the new leader had nothing to repair"
    assert not frozen.leads()


def test_an_api_server_that_stands_still_is_survived(
    local_cluster: LocalCluster, pool: Pool, start: Callable[..., OperatorProcess]
) -> None:
    operator = start()
    pool.apply(manifest())
    pool.await_settled(1, 1)
    groups = pool.sets()
    apiserver = local_cluster.status()["components"]["kube-apiserver"]
    os.kill(apiserver, signal.SIGSTOP)
    try:
        wait_until(lambda: not operator.leads(), 60, "the leader stops writing in time")
        assert operator.get("/healthz")[0] == 200, "a restart would mend nothing"
    finally:
        os.kill(apiserver, signal.SIGCONT)
    wait_until(operator.leads, 90, "it leads again")
    assert operator.process.poll() is None
    assert pool.sets() == groups
    pool.apply(manifest(decode=2))
    pool.await_settled(1, 2)
    assert groups.items() <= pool.sets().items(), "nothing was made anew"


def rights_in_one_namespace(cluster: Cluster, namespace: str, folder: Any) -> str:
    """Return a kubeconfig of the account that ``deploy/namespaced`` gives the operator of one namespace."""
    manifest = (ROOT / "deploy" / "namespaced" / "operator.yaml").read_text()
    bodies = yaml.safe_load_all(manifest.replace("namespace: team-a", f"namespace: {namespace}"))
    # The operator itself is a process of the test.
    for body in (body for body in bodies if body["kind"] != "Deployment"):
        cluster.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(body))
    token = cluster.kubectl("-n", namespace, "create", "token", "twinpool-operator").stdout.strip()
    admin = yaml.safe_load(cluster.kubeconfig.read_text())
    admin["users"] = [{"name": admin["users"][0]["name"], "user": {"token": token}}]
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(admin))
    return str(file)


def test_rights_in_one_namespace_suffice_for_that_namespace_and_the_lack_of_others_is_said(
    unattended: Cluster, pool: Pool, start: Callable[..., OperatorProcess], tmp_path: Any
) -> None:
    kubeconfig = rights_in_one_namespace(unattended, pool.namespace, tmp_path)
    everywhere = start(scope="", kubeconfig=kubeconfig)
    said = wait_until(
        lambda: (found := everywhere.get("/readyz"))[0] == 503 and "may not do" in found[1] and found[1], 60, "it says"
    )
    assert "inferencepools.serving.twinpool.dev: get, list, watch" in said
    assert "--namespace" in said
    everywhere.signal(signal.SIGTERM)
    assert everywhere.process.wait(30) == 0
    one = start(kubeconfig=kubeconfig)
    pool.apply(manifest(prefill=0))
    pool.await_settled(0, 1)
    assert one.get("/readyz")[0] == 200


def test_an_operator_for_all_namespaces_serves_this_one(pool: Pool, start: Callable[..., OperatorProcess]) -> None:
    operator = start(scope="")
    pool.apply(manifest(prefill=0))
    pool.await_settled(0, 1)
    status, text = operator.get(f"/debug/pools/{pool.namespace}/{NAME}")
    assert status == 200
    assert any(f"apply Deployment {NAME}-router" in entry["actions"] for entry in json.loads(text))


def test_a_namespace_that_holds_pool_and_operator_can_be_deleted(
    unattended: Cluster, pool: Pool, start: Callable[..., OperatorProcess], tmp_path: Any
) -> None:
    """The operator's account, rights and Lease go in any order, while it runs and while it repairs what is deleted."""
    name = f"{pool.namespace}-whole"
    unattended.kubectl("create", "namespace", name)
    try:
        whole = Pool(unattended, name)
        kubeconfig = rights_in_one_namespace(unattended, name, tmp_path)
        operator = OperatorProcess(unattended, name, name, kubeconfig)
        try:
            whole.apply(manifest())
            whole.await_settled(1, 1)
            unattended.kubectl("delete", "namespace", name, "--timeout=100s", timeout=110)
            found = unattended.kubectl("get", "namespace", name, check=False)
            assert "not found" in found.stderr
            assert operator.process.poll() is None, "the operator waits, it does not crash"
        finally:
            operator.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                operator.process.wait(30)
            if operator.process.poll() is None:
                operator.signal(signal.SIGKILL)
    finally:
        unattended.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")
