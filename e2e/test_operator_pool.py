"""The operator on a real API server: what it makes, repairs and removes, however often it dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twinpool.localcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

POOL = "llama"
KINDS = "statefulset,deployment,service,serviceaccount,role,rolebinding"
PREFIX = "serving.twinpool.dev"
OWN = "app.kubernetes.io/managed-by=twinpool"


def manifest(*, prefill: int | None = 1, decode: int = 1, template: Any = None, **spec: Any) -> str:
    role = {"resources": {"gpu": {"perNode": 0}}, "drainTimeout": "2s"}
    roles = {"decode": {**role, "replicas": decode, "podTemplate": template or {}}}
    if prefill is not None:
        roles["prefill"] = {**role, "replicas": prefill}
    body = {"model": {"name": "tiny"}, "engine": {"kind": "simulated"}, **roles, **spec}
    pool = {"apiVersion": f"{PREFIX}/v1alpha1", "kind": "InferencePool", "metadata": {"name": POOL}, "spec": body}
    text: str = yaml.safe_dump(pool)
    return text


class OperatorProcess:
    """An operator for one namespace, as a process that a test may kill."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "twinpool.operator", "--host=127.0.0.1", f"--port={self.port}"]
        command += [f"--namespace={namespace}", f"--lease-namespace={namespace}", "--lease-name=operator"]
        environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def metric(self, line: str) -> float:
        """Return the value of a metric, 0 while it was never counted or the operator does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return 0.0
        found = [float(entry.rsplit(" ", 1)[1]) for entry in text.splitlines() if entry.startswith(line)]
        return sum(found)

    def leads(self) -> bool:
        return self.metric("twinpool_operator_leader") == 1.0

    def end(self, number: int = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def unattended(twinpool: Cluster) -> Iterator[Cluster]:
    """The cluster with Twinpool's CRD and without its operator, which comes back afterwards."""
    deployment = ("-n", "twinpool-system", "scale", "deployment/twinpool-operator")
    twinpool.kubectl(*deployment, "--replicas=0")
    twinpool.kubectl("-n", "twinpool-system", "wait", "--for=delete", "pod", "--all", "--timeout=50s")
    yield twinpool
    twinpool.kubectl(*deployment, "--replicas=1")
    twinpool.kubectl(
        "-n", "twinpool-system", "wait", "--for=condition=Available", "deployment/twinpool-operator", "--timeout=50s"
    )


@pytest.fixture
def start(unattended: Cluster, namespace: str) -> Iterator[Callable[[], OperatorProcess]]:
    """Start operators for the test's namespace; all are gone afterwards."""
    started: list[OperatorProcess] = []

    def begin() -> OperatorProcess:
        started.append(OperatorProcess(unattended, namespace))
        return started[-1]

    yield begin
    for operator in started:
        if operator.process.poll() is None:
            operator.end()


class Pool:
    """A pool in the test's namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments, **options).stdout

    def apply(self, text: str) -> None:
        self.kubectl("apply", "-f", "-", input=text)

    def get(self, name: str = POOL) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.json("-n", self.namespace, "get", "tpool", name)
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        found = [item for item in self.get().get("status", {}).get("conditions", []) if item["type"] == kind]
        return found[0] if found else {"status": "", "reason": "", "message": ""}

    def objects(self, kinds: str = KINDS) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.cluster.json("-n", self.namespace, "get", kinds, "-l", OWN)["items"]
        return found

    def names(self, kind: str) -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.objects(kind))

    def groups(self) -> Counter[str]:
        return Counter(item["metadata"]["labels"][f"{PREFIX}/role"] for item in self.objects("statefulset"))

    def settled(self, prefill: int, decode: int) -> bool:
        """Return whether the pool has just what it should, all of it ready and nothing left to do."""
        status = self.get().get("status", {})
        summaries = [status.get(role, {}).get("summary") for role in ("prefill", "decode", "router")]
        counts = {role: count for role, count in (("prefill", prefill), ("decode", decode)) if count}
        return (
            summaries == [f"{prefill}/{prefill}", f"{decode}/{decode}", "1/1"]
            and self.groups() == counts
            and self.condition("Progressing")["reason"] == "Complete"
        )

    def await_settled(self, prefill: int = 1, decode: int = 1) -> None:
        wait_until(lambda: self.settled(prefill, decode), 120, f"{prefill} prefill and {decode} decode groups")

    def versions(self) -> list[tuple[str, str, str]]:
        kinds = f"{KINDS},inferencepools.{PREFIX}"
        items = self.cluster.json("-n", self.namespace, "get", kinds)["items"]
        return sorted((i["kind"], i["metadata"]["name"], i["metadata"]["resourceVersion"]) for i in items)


@pytest.fixture
def pool(unattended: Cluster, namespace: str) -> Pool:
    return Pool(unattended, namespace)


def test_a_pool_gets_its_objects_and_nothing_of_kopf(pool: Pool, start: Callable[[], OperatorProcess]) -> None:
    start()
    pool.apply(manifest(decode=2))
    pool.await_settled(1, 2)
    assert pool.names("service") == ["llama-decode", "llama-prefill", "llama-router"]
    for kind in ("deployment", "serviceaccount", "role", "rolebinding"):
        assert pool.names(kind) == ["llama-router"]
    stored = pool.get()
    for item in pool.objects():
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (stored["metadata"]["uid"], True)
    shown = json.loads(pool.kubectl("get", "tpool", POOL, "-o", "json", "--show-managed-fields"))
    managers = {entry["manager"] for entry in shown["metadata"]["managedFields"]}
    assert managers <= {"kubectl-client-side-apply", "twinpool/status"}
    assert "finalizers" not in shown["metadata"]
    assert "kopf" not in json.dumps(shown).lower()
    assert {item["type"]: item["status"] for item in stored["status"]["conditions"]} == {
        "Ready": "True",
        "Progressing": "False",
        "Placed": "True",
        "Routable": "True",
        "HandoffWorking": "Unknown",
    }


def test_scaling_out_in_and_away(pool: Pool, start: Callable[[], OperatorProcess]) -> None:
    start()
    pool.apply(manifest())
    pool.await_settled(1, 1)
    kept = pool.names("statefulset")
    pool.apply(manifest(decode=3))
    pool.await_settled(1, 3)
    pool.apply(manifest())
    pool.await_settled(1, 1)
    assert pool.names("statefulset") == kept, "the oldest group stays"
    pool.apply(manifest(prefill=None))
    wait_until(lambda: pool.groups() == {"decode": 1} and pool.names("service")[0] == "llama-decode", 60, "aggregated")
    wait_until(lambda: pool.names("service") == ["llama-decode", "llama-router"], 30, "the prefill Service is gone")


def test_deleted_children_come_back(pool: Pool, start: Callable[[], OperatorProcess]) -> None:
    start()
    pool.apply(manifest())
    pool.await_settled()
    before = {(item["kind"], item["metadata"]["uid"]) for item in pool.objects()}
    names = set(pool.names("statefulset"))
    pool.kubectl("delete", KINDS, "-l", OWN, "--wait=false")
    wait_until(lambda: len(pool.objects()) == len(before) and pool.settled(1, 1), 120, "everything is back")
    assert not before & {(item["kind"], item["metadata"]["uid"]) for item in pool.objects()}
    assert not names & set(pool.names("statefulset")), "a group's name is never used again"


EDITS = {
    "service/llama-router": {"spec": {"ports": [{"name": "http", "port": 99, "targetPort": 1}]}},
    "role/llama-router": {"rules": []},
    "deployment/llama-router": {"spec": {"replicas": 2}},
    "serviceaccount/llama-router": {"metadata": {"labels": {f"{PREFIX}/pool": None, f"{PREFIX}/role": "x"}}},
    "rolebinding/llama-router": {"subjects": []},
    "service/llama-decode": {"metadata": {"ownerReferences": None}, "spec": {"selector": {"a": "b"}}},
    "statefulset": {"spec": {"replicas": 3}, "metadata": {"labels": {f"{PREFIX}/pool": None}}},
}


def test_hand_edits_are_repaired(pool: Pool, start: Callable[[], OperatorProcess]) -> None:
    start()
    pool.apply(manifest(prefill=0))
    pool.await_settled(0, 1)
    for name in EDITS:
        edit_and_await_repair(pool, name)
    pool.await_settled(0, 1)


def edit_and_await_repair(pool: Pool, name: str) -> None:
    target = name if "/" in name else f"{name}/{pool.names(name)[0]}"
    ours = lambda body: {k: v for k, v in body.items() if k in ("spec", "rules", "subjects")}  # noqa: E731
    before = pool.cluster.json("-n", pool.namespace, "get", target)
    pool.kubectl("patch", target, "--type=merge", "-p", json.dumps(EDITS[name]))

    def repaired() -> bool:
        now = pool.cluster.json("-n", pool.namespace, "get", target)
        same = [now["metadata"].get(key) == before["metadata"].get(key) for key in ("uid", "labels", "ownerReferences")]
        return all(same) and ours(now).keys() == ours(before).keys() and _says(ours(now), ours(before))

    wait_until(repaired, 20, f"{target} is repaired")


def _says(now: Any, before: Any) -> bool:
    """Return whether what stood there stands there again; additions of others (a selector's key) may stay."""
    if isinstance(before, dict):
        return isinstance(now, dict) and all(_says(now.get(key), value) for key, value in before.items())
    return bool(now == before)


@pytest.mark.parametrize("moment", [0, 1, 4, 7])
def test_an_operator_that_is_killed_in_the_middle_leaves_no_duplicates(
    pool: Pool, start: Callable[[], OperatorProcess], moment: int
) -> None:
    first = start()
    wait_until(first.leads, 60, "the operator leads")
    pool.apply(manifest(decode=3))
    wait_until(lambda: len(pool.objects()) >= moment, 30, f"{moment} objects exist", interval=0.01)
    first.end()
    # How long the next one waits is another test's subject.
    pool.kubectl("delete", "lease", "operator")
    start()
    wait_until(lambda: pool.settled(1, 3), 60, "it converges")
    serials = [item["metadata"]["annotations"][f"{PREFIX}/serial"] for item in pool.objects("statefulset")]
    assert sorted(serials) == ["1", "2", "3", "4"], "no group was made twice"


def test_a_new_revision_replaces_group_by_group(pool: Pool, start: Callable[[], OperatorProcess]) -> None:
    start()
    pool.apply(manifest(decode=2))
    pool.await_settled(1, 2)
    old = set(pool.names("statefulset"))
    pool.apply(manifest(decode=2, engine={"kind": "simulated", "args": ["--tokens-per-second=50"]}))
    seen: list[tuple[int, int]] = []

    def replaced() -> bool:
        status = pool.get()["status"]
        seen.append((status["prefill"]["routable"], status["decode"]["routable"]))
        return not old & set(pool.names("statefulset")) and pool.settled(1, 2)

    wait_until(replaced, 90, "every group is new")
    assert min(prefill for prefill, _ in seen) >= 1
    assert min(decode for _, decode in seen) >= 2
    assert pool.condition("Ready")["status"] == "True"


def test_an_idle_pool_causes_no_write(pool: Pool, start: Callable[[], OperatorProcess]) -> None:
    operator = start()
    pool.apply(manifest(decode=2, routing={"resources": {"memory": "1024Mi"}}))
    pool.await_settled(1, 2)
    writes = 'twinpool_operator_api_requests_total{code="200",verb="PATCH"}'
    before, count = pool.versions(), operator.metric(writes)
    end = time.monotonic() + 30
    wait_until(lambda: time.monotonic() > end or pool.versions() != before, 40, "30 s or a change", interval=1.0)
    assert pool.versions() == before
    assert operator.metric(writes) == count


def test_a_restart_causes_no_write_either(pool: Pool, start: Callable[[], OperatorProcess]) -> None:
    first = start()
    pool.apply(manifest())
    pool.await_settled()
    before = pool.versions()
    assert first.end(signal.SIGTERM) == 0
    second = start()
    wait_until(lambda: second.metric('twinpool_operator_reconciles_total{result="done"}') >= 1, 30, "it has looked")
    assert pool.versions() == before
    assert second.metric('twinpool_operator_api_requests_total{code="200",verb="PATCH"}') == 0


@pytest.mark.parametrize(("number", "limit"), [(signal.SIGTERM, 2.0), (signal.SIGKILL, 20.0)])
def test_the_next_operator_takes_over(
    pool: Pool, start: Callable[[], OperatorProcess], number: int, limit: float
) -> None:
    leader = start()
    wait_until(leader.leads, 60, "the first one leads")
    # A slow machine may be late once; an operator that is late every time fails.
    for attempts_left in (2, 1, 0):
        follower = start()
        wait_until(lambda: follower.metric("twinpool_operator_api_requests_total"), 30, "the second one watches")  # noqa: B023
        assert not follower.leads()
        began = time.monotonic()
        leader.end(number)
        wait_until(follower.leads, limit + 20, "the second one leads", interval=0.05)
        if (took := time.monotonic() - began) <= limit + 0.5:  # half a second is for asking
            break
        assert attempts_left, f"{took:.1f} s"
        leader = follower
    pool.apply(manifest(prefill=0))
    pool.await_settled(0, 1)


def test_a_deleted_pool_leaves_nothing(pool: Pool, start: Callable[[], OperatorProcess]) -> None:
    operator = start()
    pool.apply(manifest())
    pool.await_settled()
    operator.end()
    pool.kubectl("delete", "tpool", POOL, "--timeout=20s")
    wait_until(lambda: not pool.objects(f"{KINDS},replicaset,pod"), 60, "nothing is left, even without an operator")


def test_a_strangers_object_is_not_taken_over(pool: Pool, start: Callable[[], OperatorProcess]) -> None:
    pool.kubectl("create", "service", "clusterip", "llama-router", "--tcp=1:1")
    start()
    pool.apply(manifest(prefill=0))
    said = wait_until(
        lambda: (found := pool.condition("Progressing"))["reason"] == "Refused" and found["message"], 40, "it is said"
    )
    assert "Service llama-router" in said
    service = pool.cluster.json("-n", pool.namespace, "get", "service", "llama-router")
    assert "ownerReferences" not in service["metadata"]
    pool.kubectl("delete", "service", "llama-router")
    wait_until(lambda: pool.settled(0, 1), 90, "the pool gets its own")


def test_a_pod_template_that_kubernetes_refuses_is_quoted(pool: Pool, start: Callable[[], OperatorProcess]) -> None:
    start()
    pool.apply(manifest(prefill=0, template={"spec": {"hostNetwerk": True}}))
    said = wait_until(
        lambda: (found := pool.condition("Progressing"))["reason"] == "Refused" and found["message"], 40, "it is said"
    )
    assert "hostNetwerk" in said
    pool.apply(manifest(prefill=0))
    pool.await_settled(0, 1)
