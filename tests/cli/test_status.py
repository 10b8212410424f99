"""``twinpool status`` and ``twinpool doctor``: what they say of pools that serve, of those that do not, and why."""

from __future__ import annotations

import copy
import json
import sys
from typing import Any, ClassVar

import pytest
import yaml

from twinpool.cli import doctor as commands
from twinpool.cli.__main__ import main
from twinpool.cli.checks import CRD
from twinpool.cli.kubectl import Kubectl, KubectlFailed
from twinpool.core import protocol
from twinpool.core.crd import custom_resource_definition

ABSENT = KubectlFailed('Error from server (NotFound): it is "not found"')
FORBIDDEN = KubectlFailed("Error from server (Forbidden): you may not")
Body = dict[str, Any]


def condition(kind: str, status: str = "True", reason: str = "Fine", message: str = "well") -> Body:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def pool() -> Body:
    return {
        "apiVersion": protocol.API_VERSION,
        "kind": protocol.KIND,
        "metadata": {"name": "llama", "namespace": "team", "uid": "u", "generation": 3},
        "spec": {
            "model": {"name": "m", "secretRef": {"name": "hub"}},
            "engine": {"imagePullSecrets": [{"name": "mirror"}]},
            "prefill": {},
            "decode": {},
            "routing": {"auth": {"secretRef": {"name": "keys"}}},
        },
        "status": {
            "observedGeneration": 3,
            "revision": "r1",
            "ratio": "1:1",
            "endpoint": "http://llama-router.team.svc",
            "prefill": {"summary": "1/1"},
            "decode": {"summary": "1/1"},
            "router": {"summary": "1/1"},
            "conditions": [condition("Ready"), condition("Progressing", "False", "Complete")],
        },
    }


def pod(role: str, *, ready: bool = True, container: Body | None = None, **status: Any) -> Body:
    group = {protocol.LABEL_GROUP: f"llama-{role}-a", protocol.LABEL_REVISION: "r1"} if role != "router" else {}
    labels = {protocol.LABEL_ROLE: role, protocol.LABEL_POOL: "llama", **group}
    conditions = [{"type": "Ready", "status": str(ready)}, {"type": "PodScheduled", "status": "True"}]
    return {
        "kind": "Pod",
        "metadata": {"name": f"llama-{role}-a-0", "labels": labels},
        "spec": {"nodeName": f"node-{role}"},
        "status": {
            "conditions": conditions,
            "containerStatuses": [
                {"name": "engine", "image": "i", "ready": ready, "restartCount": 2, "state": {}, **(container or {})}
            ],
            **status,
        },
    }


class FakeCluster:
    """What kubectl shows; an error is raised where it stands in place of an object."""

    def __init__(self) -> None:
        deployment = {
            "metadata": {"namespace": "system", "name": "twinpool-operator"},
            "status": {"availableReplicas": 1},
        }
        self.crd: Body | KubectlFailed = copy.deepcopy(custom_resource_definition())
        self.pool: Body | KubectlFailed = pool()
        self.pods = [pod("prefill"), pod("decode"), pod("router")]
        self.deployments: Body | KubectlFailed = {"items": [deployment]}
        self.secrets: dict[str, KubectlFailed] = {}

    def run(self, _: Kubectl, *arguments: str) -> str:
        kind, name = arguments[1:3]
        if kind == "secret":
            if name in self.secrets:
                raise self.secrets[name]
            return f"secret/{name}"
        if kind == CRD:
            found = {"items": [self.pool]} if name.startswith("--") else self.pool
        else:
            known = {"customresourcedefinitions": self.crd, "deployments": self.deployments}
            found = known.get(kind, {"items": self.pods})
        if isinstance(found, KubectlFailed):
            raise found
        return json.dumps(found)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(Kubectl, "run", lambda kubectl, *arguments: fake.run(kubectl, *arguments))
    return fake


def test_a_pool_that_serves(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "llama"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "llama: m, revision r1",
        "prefill 1/1, decode 1/1, router 1/1; ready: True",
        "http://llama-router.team.svc",
        "",
        "GROUP             ROLE      REVISION   PODS   STATE     RESTARTS   NODES",
        "llama-prefill-a   prefill   r1         1/1    serving   2          node-prefill",
        "llama-decode-a    decode    r1         1/1    serving   2          node-decode",
    ]


def test_a_pool_that_does_not_serve_says_why(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(cluster.pool, dict)
    cluster.pool["status"]["conditions"] = [
        condition("Ready", "False", "NoPair", "no group; wait"),
        condition("Progressing", "False", "ProgressDeadlineExceeded", "too long"),
        condition("HandoffWorking", "Unknown", "NotMeasured"),
    ]
    assert main(["status", "llama"]) == 1
    out = capsys.readouterr().out
    assert "Ready is False (NoPair): no group; wait" in out
    assert "Progressing is False (ProgressDeadlineExceeded): too long" in out
    assert "NotMeasured" not in out


def test_a_new_pool(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(cluster.pool, dict)
    del cluster.pool["status"]
    cluster.pods = []
    assert main(["status", "llama"]) == 1
    assert "nothing runs yet; ready: Unknown\n\nthe operator has not looked at it yet" in capsys.readouterr().out


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_for_programs(cluster: FakeCluster, capsys: pytest.CaptureFixture[str], output: str) -> None:
    assert main(["status", "llama", "-o", output]) == 0
    one = yaml.safe_load(capsys.readouterr().out)
    assert [group["nodes"] for group in one["groups"]] == [["node-prefill"], ["node-decode"]]
    assert main(["status", "-A", "-o", output]) == 0
    (line,) = yaml.safe_load(capsys.readouterr().out)
    assert line == {
        "namespace": "team",
        "name": "llama",
        "prefill": "1/1",
        "decode": "1/1",
        "router": "1/1",
        "ratio": "1:1",
        "ready": "True",
        "why": "",
    }
    assert main(["doctor", "llama", "--no-ask", "-o", output]) == 0
    assert [item["outcome"] for item in yaml.safe_load(capsys.readouterr().out)] == ["ok"] * 10 + ["unknown"]


def test_all_pools(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAMESPACE", "NAME", "PREFILL", "DECODE", "RATIO", "ROUTER", "READY", "WHY"]
    assert line.split() == ["team", "llama", "1/1", "1/1", "1:1", "1/1", "True"]


def test_on_a_terminal_it_is_the_same_in_colour(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["status", "llama"]) == 0
    assert "llama-prefill-a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, "ending"),
        ({"annotations": {protocol.ANNOTATION_DRAINING: "true"}}, "draining"),
        ({"gates": [{"name": "g"}]}, "waits for nodes"),
        ({"scheduled": "False"}, "no node fits"),
        ({"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}, "ImagePullBackOff"),
        ({"containers": "True"}, "waits for routers"),
        ({}, "starting"),
    ],
)
def test_states(cluster: FakeCluster, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str) -> None:
    body = pod("decode", ready=False)
    body["metadata"] |= {key: value for key, value in changes.items() if key in ("deletionTimestamp", "annotations")}
    body["spec"]["schedulingGates"] = changes.get("gates", [])
    body["status"]["conditions"][1]["status"] = changes.get("scheduled", "True")
    body["status"]["conditions"].append({"type": "ContainersReady", "status": changes.get("containers", "False")})
    if "waiting" in changes:
        body["status"]["containerStatuses"][0]["state"] = {"waiting": changes["waiting"]}
    cluster.pods = [body]
    main(["status", "llama", "-o", "json"])
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["state"] == words


@pytest.mark.parametrize(("total", "words"), [(400, "weights 25 %, downloading"), (0, "weights, downloading")])
def test_a_group_that_loads_its_weights(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], total: int, words: str
) -> None:
    body = pod("decode", ready=False)
    cluster.pods = [body]
    name = body["metadata"]["labels"][protocol.LABEL_GROUP]
    shown = pool()
    shown["status"]["loading"] = [{"group": name, "stage": "downloading", "bytes": 100, "total": total}]
    cluster.pool = shown
    main(["status", "llama", "-o", "json"])
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["state"] == words


def test_doctor_finds_nothing(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "llama"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("   ")[0].strip() for line in lines[1:]] == [
        *("CRD", "operator", "pool", "secret", "secret", "secret", "conditions"),
        *("prefill pods", "decode pods", "router pods", "a token"),
    ]
    assert all(" ok " in line for line in lines[1:-1])
    assert "unknown   the endpoint asks for HTTPS or an API key" in lines[-1]


class Answers:
    """Forwarded ports without kubectl, behind which somebody gives this answer."""

    came: tuple[int, str] | None = (200, "{}")
    asked: ClassVar[list[tuple[object, ...]]] = []

    def __init__(self, _: object) -> None:
        pass

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def post(self, *question: object) -> tuple[int, str] | None:
        self.asked.append(question)
        return self.came


@pytest.mark.parametrize(
    ("came", "code", "words"),
    [
        ((200, "{}"), 0, "a token ok llama-router-a-0 answered one"),
        (None, 1, "llama-router-a-0 did not answer in time"),
        ((503, '{"error":\n "no pair"}'), 1, 'llama-router-a-0 answered 503: {"error": "no pair"}'),
    ],
)
def test_doctor_asks_for_a_token(
    cluster: FakeCluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    came: tuple[int, str] | None,
    code: int,
    words: str,
) -> None:
    assert isinstance(cluster.pool, dict)
    del cluster.pool["spec"]["routing"]
    monkeypatch.setattr(Answers, "came", came)
    monkeypatch.setattr(commands, "Forwards", Answers)
    assert main(["doctor", "llama"]) == code
    assert words in " ".join(capsys.readouterr().out.split())
    pod, port, path, body, _ = Answers.asked.pop()
    assert (pod, port, path) == ("llama-router-a-0", protocol.ROUTER_PORT, "/v1/completions")
    assert json.loads(str(body, "utf-8"))["max_tokens"] == 1  # type: ignore[arg-type]


def old_crd(cluster: FakeCluster) -> None:
    assert isinstance(cluster.crd, dict)
    schema = cluster.crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    del schema["properties"]["spec"]["properties"]["routing"]


def other_version(cluster: FakeCluster) -> None:
    assert isinstance(cluster.crd, dict)
    cluster.crd["spec"]["versions"][0]["name"] = "v9"


def no_crd(cluster: FakeCluster) -> None:
    cluster.crd, cluster.pool = ABSENT, KubectlFailed('the server doesn\'t have a resource type "inferencepools"')


def no_operator(cluster: FakeCluster) -> None:
    cluster.deployments = {"items": []}


def dead_operator(cluster: FakeCluster) -> None:
    assert isinstance(cluster.deployments, dict)
    del cluster.deployments["items"][0]["status"]


def no_pool(cluster: FakeCluster) -> None:
    cluster.pool = ABSENT


def unseen(cluster: FakeCluster) -> None:
    assert isinstance(cluster.pool, dict)
    cluster.pool["metadata"]["generation"] = 4


def no_secret(cluster: FakeCluster) -> None:
    cluster.secrets["hub"] = ABSENT


def refused(cluster: FakeCluster) -> None:
    assert isinstance(cluster.pool, dict)
    cluster.pool["status"]["conditions"].append(condition("Placed", "False", "Short", "2 GPUs are short; add a node"))


def no_router(cluster: FakeCluster) -> None:
    cluster.pods = cluster.pods[:2]


def crashing(cluster: FakeCluster) -> None:
    ended = {"terminated": {"exitCode": 3, "reason": "Error", "message": "first\nCUDA out of memory\n"}}
    cluster.pods[1] = pod("decode", ready=False, container={"lastState": ended})


def no_image(cluster: FakeCluster) -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "manifest unknown"}}
    cluster.pods[1] = pod("decode", ready=False, container={"state": waiting})


def no_node(cluster: FakeCluster) -> None:
    cluster.pods[0] = pod("prefill", ready=False)
    cluster.pods[0]["status"]["conditions"][1] |= {"status": "False", "message": "0/3 nodes are available"}


@pytest.mark.parametrize(
    ("harm", "found", "fix"),
    [
        (no_crd, f"the cluster does not know {CRD}", "CRD: helm install"),
        (old_crd, "fields such as spec.routing would be dropped", "CRD: helm upgrade"),
        (other_version, "does not serve v1alpha1", "CRD: helm upgrade"),
        (no_operator, "no operator is installed", "operator: helm install"),
        (dead_operator, "system/twinpool-operator has no available replica", "kubectl -n system logs deployment"),
        (no_pool, "there is no pool llama in this namespace", "pool: kubectl get tpool --all-namespaces"),
        (unseen, "the operator has not seen its newest spec", "does it serve this namespace?"),
        (no_secret, "the pool names Secret hub, which does not exist", "secret: kubectl create secret generic hub"),
        (refused, "Short: 2 GPUs are short; add a node", "2 GPUs are short"),
        (no_router, "router pods failed there are none", "the conditions above say why"),
        (crashing, "starting (engine ended with 3: CUDA out of memory)", "kubectl logs llama-decode-a-0"),
        (no_image, "ErrImagePull (manifest unknown)", "check engine.image"),
        (no_node, "no node fits (0/3 nodes are available)", "twinpool explain POOL --placement"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_doctor_names_each_fault_and_its_fix(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str], harm: Any, found: str, fix: str
) -> None:
    harm(cluster)
    assert main(["doctor", "llama"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert found in out
    assert fix in out


def test_what_may_not_be_read_is_unknown_and_no_fault(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.crd, cluster.deployments, cluster.secrets = FORBIDDEN, FORBIDDEN, {"keys": FORBIDDEN}
    assert main(["doctor", "llama", "-o", "json"]) == 0
    unknown = [item["check"] for item in json.loads(capsys.readouterr().out) if item["outcome"] == "unknown"]
    assert unknown == ["CRD", "operator", "secret", "a token"]
    cluster.pool = FORBIDDEN
    assert main(["doctor", "llama"]) == 0
    assert "pool       unknown" in capsys.readouterr().out


def test_a_cluster_that_cannot_be_reached_is_the_only_finding(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.crd = KubectlFailed("The connection to the server was refused")
    assert main(["doctor", "llama"]) == 1
    assert "twinpool: The connection to the server was refused" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_commands(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "doctor" in out
    assert "rollout" in out
