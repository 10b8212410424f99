"""Groups over several nodes on a cluster of their own: ranks that die together, lost nodes, and who notices."""

from __future__ import annotations

import io
import json
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.core.protocol import Leader
from twinpool.demo.client import get, post, stream
from twinpool.demo.load import Load
from twinpool.demo.phases import Phases
from twinpool.demo.scenario import condition, install_twinpool, pool, router_url
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.demo.near import OwnCluster
    from twinpool.localcluster.cluster import LocalCluster

pytestmark = pytest.mark.cluster

NAME, MODEL = "wide", "tiny"
#: The node of everything that is not a worker, which no test kills.
SPARE = "node-e"
GONE = [
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    for taint in ("unreachable", "not-ready")
]


def manifest(replicas: int, drain: str) -> str:
    """Return a pool whose groups have two ranks of two GPUs each, and whose router is on the spare node."""
    decode: dict[str, Any] = {
        "replicas": replicas,
        "parallelism": {"tensor": 2, "pipeline": 2},
        "resources": {"gpu": {"perNode": 2}},
        "scheduling": {"tolerations": GONE},
        "startupTimeout": "2m",
        "drainTimeout": drain,
        # The simulated engine needs no GPU; these pods ask for some, so that they are placed as others would be.
        "podTemplate": {
            "spec": {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
        },
    }
    # That node is closed to workers, and only to them.
    closed = {"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}
    router = {"nodeSelector": {"kubernetes.io/hostname": SPARE}, "tolerations": [closed]}
    spec = {
        "model": {"name": MODEL},
        "engine": {"kind": "simulated", "args": ["--tokens-per-second=40"]},
        "decode": decode,
        "routing": {"podTemplate": {"spec": router}},
    }
    body = {"apiVersion": protocol.API_VERSION, "kind": protocol.KIND, "metadata": {"name": NAME}, "spec": spec}
    text: str = yaml.safe_dump(body)
    return text


@pytest.fixture(scope="module")
def five(own_cluster: OwnCluster) -> Iterator[LocalCluster]:
    """A cluster of five nodes with two GPUs each, and Twinpool on the one that is closed to workers."""
    nodes = [f"node-{letter}" for letter in "abcde"]
    with own_cluster("nodes", [{"name": name, "gpus": 2} for name in nodes]) as local:
        workers = [node for node in nodes if node != SPARE]
        local.kubectl("cordon", *workers)
        install_twinpool(local, Phases(io.StringIO()))
        local.kubectl("uncordon", *workers)
        local.kubectl("cordon", SPARE)
        yield local


class Pool:
    """The pool of a test: its groups, and what its router says about them."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments, **options).stdout

    def apply(self, replicas: int = 2, drain: str = "30s") -> None:
        self.kubectl("apply", "-f", "-", input=manifest(replicas, drain))
        self.wanted = replicas

    def pods(self) -> dict[str, dict[str, Any]]:
        """Return the worker pods by name, those on their way out too."""
        selector = f"{protocol.LABEL_POOL}={NAME},{protocol.LABEL_ROLE}=decode"
        items = self.cluster.json("-n", self.namespace, "get", "pods", "-l", selector)["items"]
        return {item["metadata"]["name"]: item for item in items}

    def sets(self) -> dict[str, dict[str, Any]]:
        """Return the StatefulSets by name, those on their way out too."""
        items = self.cluster.json("-n", self.namespace, "get", "statefulset")["items"]
        return {item["metadata"]["name"]: item for item in items}

    def groups(self) -> dict[str, list[dict[str, Any]]]:
        """Return the pods that are to stay by group, the leader first."""
        found: dict[str, list[dict[str, Any]]] = {}
        for _, pod in sorted(self.pods().items()):
            if not pod["metadata"].get("deletionTimestamp"):
                found.setdefault(pod["metadata"]["labels"][protocol.LABEL_GROUP], []).append(pod)
        return found

    def serving(self) -> int:
        """Return how many groups get requests."""
        count: int = pool(self.cluster, self.namespace, NAME)["status"]["decode"]["routable"]
        return count

    def whole(self) -> bool:
        found = pool(self.cluster, self.namespace, NAME)
        ready = condition(found, "Ready").get("status") == "True"
        return ready and self.serving() == self.wanted and all(len(pods) == 2 for pods in self.groups().values())

    def await_whole(self) -> None:
        wait_until(self.whole, 150, "every group is whole and serves")

    def url(self) -> str:
        return f"{router_url(self.cluster, self.namespace, NAME)}/v1/completions"

    def in_flight(self) -> dict[str, int]:
        """Return how many requests the router has under way in each group."""
        (router,) = {router_url(self.cluster, self.namespace, NAME).rsplit(":", 1)[0]}
        entries = json.loads(get(f"{router}:{protocol.ROUTER_ADMIN_PORT}/admin/endpoints"))["endpoints"]
        return {entry["group"]: entry["inFlight"] for entry in entries}

    def load(self) -> Load:
        return Load(self.cluster, self.namespace, NAME, MODEL, clients=2)

    def kill_engine(self, pod: str) -> None:
        find = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q simulate && kill -9 ${p#/proc/}; done"
        self.kubectl("exec", pod, "-c", "engine", "--", "sh", "-c", find, check=False)


class Answers:
    """Long answers that are under way, and how each of them ends."""

    def __init__(self, url: str, tokens: int) -> None:
        self._url = url
        self._body = {"model": MODEL, "prompt": "a long answer", "max_tokens": tokens, "ignore_eos": True}
        self._threads: list[threading.Thread] = []
        self.begun: list[str] = []
        self.whole: list[str] = []
        self.streamed: list[str] = []

    def ask(self, streams: int = 0, whole: int = 0) -> None:
        threads = [threading.Thread(target=self._stream) for _ in range(streams)]
        threads += [threading.Thread(target=self._post) for _ in range(whole)]
        for thread in threads:
            thread.start()
        self._threads += threads

    def end(self) -> None:
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads), "a client hangs"

    def broken(self) -> int:
        return sum("worker_lost" in text for text in self.streamed)

    def _stream(self) -> None:
        last = ""
        try:
            for event in stream(self._url, self._body):
                if not last:
                    self.begun.append(event["id"])
                last = str(event["choices"][0]["finish_reason"])
        except Exception as error:
            last = str(error)
        self.streamed.append(last)

    def _post(self) -> None:
        reply = post(self._url, self._body)
        self.whole.append(str(reply.json()["choices"][0]["finish_reason"]) if reply.status == 200 else str(reply.body))


@pytest.fixture
def served(five: LocalCluster) -> Iterator[Pool]:
    """The pool of a test, which is gone afterwards, as its nodes' GPUs are the next one's."""
    with five.fresh_namespace() as namespace:
        made = Pool(five, namespace)
        yield made
        made.kubectl("delete", "tpool", NAME)
        # The garbage collector of a cluster that has just begun knows new kinds only after half a minute.
        made.kubectl("delete", "statefulset", "--all")
        wait_until(lambda: not made.pods(), 90, "its pods are gone")


def under_way(served: Pool, answers: Answers, streams: int) -> dict[str, int]:
    """Begin ``streams`` streams, and more until each group has some; return how many each of them has.

    A worker that has just come gets a small share of the requests at first.
    """
    asked, more = 0, streams
    while True:
        answers.ask(streams=more)
        asked, more = asked + more, 1
        wait_until(lambda: len(answers.begun) == asked, 60, "every stream has begun")  # noqa: B023
        found = served.in_flight()
        assert sum(found.values()) == asked
        if all(found.values()):
            return found
        assert asked < 40, f"every group has some of them: {found}"


def test_only_the_streams_of_a_group_fail_whose_rank_dies_and_its_ranks_restart_together(served: Pool) -> None:
    served.apply()
    served.await_whole()
    before = served.groups()
    for pods in before.values():
        assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
        told = {pod["metadata"]["annotations"][protocol.ANNOTATION_LEADER] for pod in pods}
        leader = Leader(pods[0]["status"]["podIP"], pods[0]["metadata"]["uid"], 1)
        assert told == {leader.to_json()}
    answers = Answers(served.url(), tokens=500)
    has = under_way(served, answers, 8)
    answers.ask(whole=4)
    wait_until(lambda: sum(served.in_flight().values()) == sum(has.values()) + 4, 30, "the others have begun too")
    victim = min(before)
    served.kill_engine(before[victim][1]["metadata"]["name"])
    wait_until(lambda: served.serving() == 1, 60, "a group without one rank gets no requests")
    answers.end()
    assert Counter(answers.streamed)["length"] == sum(has.values()) - has[victim], answers.streamed
    assert answers.broken() == has[victim], answers.streamed
    assert answers.whole == ["length"] * 4, "what had no answer yet was asked of the other group"
    served.await_whole()
    after = served.groups()
    uids = lambda groups: {pod["metadata"]["uid"] for pods in groups.values() for pod in pods}  # noqa: E731
    assert uids(after) == uids(before)
    ran = [status for pods in after.values() for pod in pods for status in pod["status"]["containerStatuses"]]
    assert all(status["restartCount"] == 0 for status in ran)
    marks = lambda: served.sets()[victim]["metadata"]["annotations"]  # noqa: E731
    note = json.loads(wait_until(lambda: marks().get(f"{protocol.GROUP}/engine-restarts", ""), 30, "it is counted"))
    assert (note["total"], note["recent"], note["budget"]) == (1, 1, 5)
    assert note["leader"] == before[victim][0]["metadata"]["uid"]


def test_a_group_that_loses_a_pod_or_goes_under_load_fails_no_request(served: Pool) -> None:
    """A pod that is deleted has its group emptied by the launchers; one that is scaled in by the operator."""
    served.apply()
    served.await_whole()
    name, (first, second) = min(served.groups().items())
    with served.load() as load:
        # What an eviction does, too.
        served.kubectl("delete", "pod", first["metadata"]["name"])

        def renewed() -> bool:
            now = served.groups()[name]
            told = [pod["metadata"].get("annotations", {}).get(protocol.ANNOTATION_LEADER, "") for pod in now]
            known = [Leader.from_json(text) for text in told]
            return all(leader is not None and leader.epoch == 2 for leader in known) and served.whole()

        wait_until(renewed, 120, "the ranks follow the new leader")
        assert served.groups()[name][1]["metadata"]["uid"] == second["metadata"]["uid"]
        load.more(8)
        served.apply(1)
        wait_until(lambda: len(served.pods()) == 2, 90, "one group went, with both of its pods")
        load.more(8)
    assert load.failures == [], f"{len(load.failures)} of {load.ended} failed"


def test_a_lost_node_breaks_the_streams_of_its_group_alone_which_is_replaced_once_gpus_are_spare(
    served: Pool, five: LocalCluster
) -> None:
    served.apply(drain="1s")
    served.await_whole()
    name, (_, second) = min(served.groups().items())
    # Longer than the leader takes to miss a rank that says nothing.
    answers = Answers(served.url(), tokens=1200)
    has = under_way(served, answers, 8)
    lost = second["spec"]["nodeName"]
    five.kill_node(lost)
    try:

        def explained() -> str:
            found = condition(pool(five, served.namespace, NAME), "Placed")
            return found["message"] if found["status"] == "False" else ""

        said = wait_until(explained, 180, "the pool says that no node is left")
        assert "has no node" in said
        assert "nvidia.com/gpu" in said or "unschedulable" in said
        assert name not in served.groups()
        answers.end()
        assert Counter(answers.streamed)["length"] == sum(has.values()) - has[name], answers.streamed
        assert answers.broken() == has[name], answers.streamed
        five.kubectl("uncordon", SPARE)
        served.await_whole()
        hanging = served.pods()[second["metadata"]["name"]]
        assert hanging["metadata"]["deletionTimestamp"], "nothing was force-deleted"
        assert post(served.url(), {"model": MODEL, "prompt": "a b c", "max_tokens": 3}).status == 200
    finally:
        five.kubectl("cordon", SPARE)
        five.start_node(lost)
    gone = "the node is back, what hung there is gone"
    wait_until(lambda: second["metadata"]["name"] not in served.pods(), 90, gone)
    wait_until(lambda: len(served.sets()) == 2, 60, "and so is its group")
