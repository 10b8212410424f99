"""Nobody's request fails while groups come and go: rollouts, scale-in, node drains, with or without the operator."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.client import get, post, stream, total
from twinpool.demo.load import Load
from twinpool.demo.scenario import condition, pods, pool, router_url
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from twinpool.localcluster.cluster import Cluster, LocalCluster

pytestmark = pytest.mark.cluster

NAME, MODEL = "served", "simulated-model"
KINDS = "statefulset,deployment,service,serviceaccount,role,rolebinding,poddisruptionbudget,replicaset,pod"


def manifest(
    prefill: int = 2, decode: int = 2, args: tuple[str, ...] = (), routers: int = 1, drain: str = "30s"
) -> str:
    """Return a pool whose answers take about half a second, with its pods spread over the nodes."""
    apart = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {protocol.LABEL_POOL: NAME}},
        "nodeTaintsPolicy": "Honor",
        "matchLabelKeys": [protocol.LABEL_ROLE, protocol.LABEL_REVISION],
    }
    spread = {"spec": {"topologySpreadConstraints": [apart]}}
    role = {"resources": {"gpu": {"perNode": 0}}, "drainTimeout": drain, "podTemplate": spread}
    spec = {
        "model": {"name": MODEL},
        "engine": {"kind": "simulated", "args": ["--tokens-per-second=40", *args]},
        "prefill": {**role, "replicas": prefill},
        "decode": {**role, "replicas": decode},
        "routing": {"replicas": routers},
    }
    body = {"apiVersion": protocol.API_VERSION, "kind": protocol.KIND, "metadata": {"name": NAME}, "spec": spec}
    text: str = yaml.safe_dump(body)
    return text


class Pool:
    """The pool of a test."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments, **options).stdout

    def apply(self, prefill: int = 2, decode: int = 2, **changes: Any) -> None:
        self.kubectl("apply", "-f", "-", input=manifest(prefill, decode, **changes))
        self.wanted = {"prefill": prefill, "decode": decode}

    def groups(self) -> list[Any]:
        found: list[Any] = self.cluster.json(
            "-n", self.namespace, "get", "statefulset", "-l", f"{protocol.LABEL_POOL}={NAME}"
        )["items"]
        return found

    def names(self) -> set[str]:
        return {group["metadata"]["name"] for group in self.groups()}

    def settled(self) -> bool:
        found = pool(self.cluster, self.namespace, NAME)
        status = found.get("status", {})
        return (
            status.get("observedGeneration") == found["metadata"]["generation"]
            and all(status.get(role, {}).get("ready") == count for role, count in self.wanted.items())
            and len(self.groups()) == sum(self.wanted.values())
            and condition(found, "Ready").get("status") == "True"
            and condition(found, "Progressing").get("reason") == "Complete"
        )

    def await_settled(self, timeout: float = 120) -> None:
        wait_until(self.settled, timeout, f"the pool has {self.wanted} ready groups and nothing left to do")

    def load(self, clients: int = 4) -> Load:
        return Load(self.cluster, self.namespace, NAME, MODEL, clients)


@pytest.fixture
def served(twinpool: Cluster, namespace: str) -> Pool:
    return Pool(twinpool, namespace)


def none_failed(load: Load) -> None:
    assert load.failures == [], f"{len(load.failures)} of {load.ended} failed"


def test_a_rolling_update_fails_no_request(served: Pool) -> None:
    served.apply()
    served.await_settled()
    old = served.names()
    with served.load() as load:
        served.apply(args=("--prefill-tokens-per-second=100000",))
        served.await_settled()
        load.more(8)
    assert not old & served.names(), "every group is new"
    none_failed(load)


def test_scaling_in_decode_and_prefill_fails_no_request(served: Pool) -> None:
    served.apply(3, 3)
    served.await_settled()
    with served.load(6) as load:
        served.apply(3, 1)
        served.await_settled()
        load.more(8)
        served.apply(1, 1)
        served.await_settled()
        load.more(8)
    none_failed(load)


def test_a_group_goes_only_when_its_requests_have_ended(served: Pool) -> None:
    """The busy group stays while an idle one can go; when it must go too, its request still gets its whole answer."""
    served.apply(1, 2, drain="90s")
    served.await_settled()
    base = router_url(served.cluster, served.namespace, NAME)
    long = {"model": MODEL, "prompt": "a long answer", "max_tokens": 1200, "temperature": 0, "ignore_eos": True}
    replies: list[Any] = []
    client = threading.Thread(target=lambda: replies.append(post(f"{base}/v1/completions", long)))
    client.start()
    admin = f"{base.rsplit(':', 1)[0]}:{protocol.ROUTER_ADMIN_PORT}"

    def busy() -> list[str]:
        entries = json.loads(get(f"{admin}/admin/endpoints"))["endpoints"]
        return [entry["group"] for entry in entries if entry["role"] == "decode" and entry["inFlight"]]

    (group,) = wait_until(busy, 30, "decode works on it")
    served.apply(1, 1, drain="90s")
    wait_until(lambda: len(served.groups()) == 2, 60, "one decode group went")
    assert group in served.names(), "the idle one went"
    served.apply(1, 1, drain="90s", args=("--prefill-tokens-per-second=100000",))
    wait_until(lambda: drains(served, group), 90, "the busy one is marked")
    assert not replies, "the answer has not ended before its group had to go"
    client.join(120)
    assert [reply.status for reply in replies] == [200]
    assert replies[0].json()["usage"]["completion_tokens"] == 1200


def drains(served: Pool, group: str) -> bool:
    marks = {item["metadata"]["name"]: item["metadata"].get("annotations", {}) for item in served.groups()}
    return protocol.ANNOTATION_DRAINING in marks.get(group, {})


def test_draining_a_node_fails_no_request(local_cluster: LocalCluster, served: Pool) -> None:
    served.apply(routers=2)
    served.await_settled()
    (victim, *_) = pods(served.cluster, served.namespace, NAME, "decode")
    node = victim["spec"]["nodeName"]
    lowest: list[int] = []
    with served.load() as load:
        try:
            selector = f"{protocol.LABEL_POOL}={NAME}"
            served.cluster.kubectl(
                "drain", node, f"--pod-selector={selector}", "--ignore-daemonsets", "--delete-emptydir-data",
                "--timeout=110s", timeout=120,
            )  # fmt: skip
            lowest.append(pool(served.cluster, served.namespace, NAME)["status"]["decode"]["routable"])
            load.more(8)
        finally:
            served.cluster.kubectl("uncordon", node)
        served.await_settled()
        load.more(8)
    none_failed(load)
    assert min(lowest) >= 1


def test_one_eviction_blocks_every_other_group_of_the_role(served: Pool) -> None:
    served.apply(1, 2)
    served.await_settled()
    first, second = (pod["metadata"]["name"] for pod in pods(served.cluster, served.namespace, NAME, "decode"))
    assert evict(served, first) == ""
    assert "disruption budget" in evict(served, second)
    served.await_settled()
    # The budget's controller learns a moment later than we do that the first is back.
    wait_until(lambda: evict(served, second) == "", 60, "when the first is back the second may go")
    (alone,) = (pod["metadata"]["name"] for pod in pods(served.cluster, served.namespace, NAME, "prefill"))
    assert evict(served, alone) == "", "a role of one group holds no node"
    said = condition(pool(served.cluster, served.namespace, NAME), "Routable")
    assert said["status"] == "False" or "prefill has one group" in said["message"]


def evict(served: Pool, pod: str) -> str:
    """Ask for an eviction; return why it is refused, empty when it is not."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": served.namespace}}
    path = f"/api/v1/namespaces/{served.namespace}/pods/{pod}/eviction"
    done = served.cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body), check=False)
    return "" if done.returncode == 0 else done.stderr


def test_the_operator_killed_in_the_middle_of_a_rollout_fails_no_request(served: Pool) -> None:
    served.apply()
    served.await_settled()
    old = served.names()
    with served.load() as load:
        served.apply(args=("--prefill-tokens-per-second=100000",))
        wait_until(lambda: served.names() - old, 60, "the rollout has begun")
        kill_operator(served.cluster)
        load.more(8)
        wait_until(lambda: len(old & served.names()) < len(old), 120, "an old group went")
        kill_operator(served.cluster)
        served.await_settled(180)
        load.more(8)
    none_failed(load)


def kill_operator(cluster: Cluster) -> None:
    """End the operator's process with SIGKILL, as a lack of memory would; its container is started again."""
    script = (
        "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q twinpool-operator && kill -9 ${p#/proc/}; done"
    )
    cluster.kubectl(
        "-n", "twinpool-system", "exec", "deployment/twinpool-operator", "--", "sh", "-c", script, check=False
    )


def test_an_eviction_without_an_operator_fails_no_request(twinpool: Cluster, served: Pool) -> None:
    served.apply()
    served.await_settled()
    operator = ("-n", "twinpool-system", "scale", "deployment/twinpool-operator")
    twinpool.kubectl(*operator, "--replicas=0")
    try:
        twinpool.kubectl("-n", "twinpool-system", "wait", "--for=delete", "pod", "--all", "--timeout=50s")
        (victim, *_) = pods(twinpool, served.namespace, NAME, "decode")
        with served.load() as load:
            assert evict(served, victim["metadata"]["name"]) == ""

            def gone() -> bool:
                uids = {pod["metadata"]["uid"] for pod in pods(twinpool, served.namespace, NAME, "decode")}
                return victim["metadata"]["uid"] not in uids

            wait_until(gone, 60, "the evicted worker is gone")
            load.more(16)
        none_failed(load)
    finally:
        twinpool.kubectl(*operator, "--replicas=1")
        twinpool.kubectl(
            "-n", "twinpool-system", "wait", "--for=condition=Available", "deployment/twinpool-operator",
            "--timeout=50s",
        )  # fmt: skip
    served.await_settled()


def test_deleting_an_idle_pool_fails_no_request_and_takes_seconds(served: Pool) -> None:
    served.apply()
    served.await_settled()
    with served.load() as load:
        pass
    none_failed(load)
    served.kubectl("delete", "tpool", NAME, "--timeout=20s")
    selector = f"{protocol.LABEL_POOL}={NAME}"
    # The KV cache of the last requests was pulled, so nobody waits for a lease or a drain's deadline.
    wait_until(lambda: not served.kubectl("get", KINDS, "-l", selector, "-o", "name"), 30, "nothing is left")


def test_drains_are_counted_by_how_they_ended(served: Pool) -> None:
    before = drained(served.cluster)
    served.apply(1, 2)
    served.await_settled()
    served.apply(1, 1)
    served.await_settled()
    after = drained(served.cluster)
    assert after["drained"] > before["drained"]
    assert after["deadline"] == before["deadline"]


def test_a_request_that_outlasts_its_drain_is_counted_and_ends_in_words(served: Pool) -> None:
    before = drained(served.cluster)
    served.apply(1, 1, drain="2s")
    served.await_settled()
    base = router_url(served.cluster, served.namespace, NAME)
    endless = {"model": MODEL, "prompt": "too long", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
    ended: list[str] = []

    def ask() -> None:
        try:
            *_, last = (choice for event in stream(f"{base}/v1/completions", endless) for choice in event["choices"])
            ended.append(last["finish_reason"])
        except Exception as error:
            ended.append(str(error))

    client = threading.Thread(target=ask)
    client.start()
    admin = f"{base.rsplit(':', 1)[0]}:{protocol.ROUTER_ADMIN_PORT}/admin/endpoints"
    wait_until(lambda: any(e["inFlight"] for e in json.loads(get(admin))["endpoints"]), 30, "decode works on it")
    served.apply(1, 1, drain="2s", args=("--prefill-tokens-per-second=100000",))
    client.join(90)
    served.await_settled()
    assert ended, "the client hangs"
    # An engine that must stop says "abort" in the answer; one that dies makes the router say it.
    assert ended[0] == "abort" or "error in the stream" in ended[0], ended
    assert drained(served.cluster)["deadline"] > before["deadline"]


def drained(cluster: Cluster) -> dict[str, float]:
    (pod,) = cluster.json("-n", "twinpool-system", "get", "pods", "-l", "app.kubernetes.io/name=twinpool-operator")[
        "items"
    ]
    text = get(f"http://{pod['status']['podIP']}:8080/metrics")
    return {result: total(text, "twinpool_operator_drains_total", result=result) for result in ("drained", "deadline")}
