"""``twinpool defragment --apply`` against a kubectl that plays the operator's part, in no time."""

from __future__ import annotations

import copy
import io
import json
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.cli import moving
from twinpool.cli.__main__ import main
from twinpool.cli.kubectl import Kubectl
from twinpool.core import protocol
from twinpool.core.spec import InferencePool
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Apply
from twinpool.operator.logic.observed import Observed
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

SPEC: dict[str, Any] = {"model": {"name": "m"}, "decode": {"parallelism": {"tensor": 16}}, "placement": {}}
POOL: dict[str, Any] = {
    "apiVersion": protocol.API_VERSION,
    "kind": protocol.KIND,
    "metadata": {"name": "llama", "namespace": "team", "uid": "u", "generation": 1},
    "spec": SPEC,
    "status": {},
}


def node(name: str, clique: str) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True"}]
    status = {"allocatable": {"nvidia.com/gpu": "8", "pods": "100"}, "conditions": conditions}
    return {"kind": "Node", "metadata": {"name": name, "labels": {"nvidia.com/gpu.clique": clique}}, "status": status}


class Cluster:
    """A group that is torn over two NVLink domains, a whole free one, and an operator that moves when time passes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pool = copy.deepcopy(POOL)
        self.nodes = [node("n0", "c0"), node("n1", "c1"), node("n2", "c2"), node("n3", "c2")]
        self.sets: dict[str, dict[str, Any]] = {}
        self.where: dict[str, tuple[str, ...]] = {}
        self.ready: set[str] = set()
        self.budgets: list[dict[str, Any]] = []
        #: Where the operator puts what comes next, and what happens after each pause.
        self.successor = ("n2", "n3")
        self.script: list[Callable[[], None]] = [self.open, self.load, self.end]
        self.put(self.made(), "old", ("n0", "n1"))
        self.ready.add("old")

    def made(self) -> dict[str, Any]:
        observed = Observed(InferencePool.model_validate(self.pool))
        actions = plan(observed, Settings(sees_nodes=True), 0.0).actions
        (body,) = [
            dict(action.body) for action in actions if isinstance(action, Apply) and action.kind == "StatefulSet"
        ]
        return body

    def put(self, body: dict[str, Any], name: str, where: tuple[str, ...]) -> None:
        body = copy.deepcopy(body)
        body["metadata"].update(name=name, uid=f"uid-{name}", resourceVersion="7")
        body["spec"]["template"]["metadata"]["labels"][protocol.LABEL_GROUP] = name
        self.sets[name], self.where[name] = body, where

    def open(self) -> None:
        self.put(self.sets["old"] | {"metadata": self.made()["metadata"]}, "new", self.successor)

    def load(self) -> None:
        self.ready.add("new")

    def end(self) -> None:
        del self.sets["old"], self.where["old"]

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.script:
            self.script.pop(0)()

    def monotonic(self) -> float:
        return self.now

    def pods(self) -> list[dict[str, Any]]:
        return [
            self._pod(self.sets[name], name, rank, where)
            for name, nodes in self.where.items()
            for rank, where in enumerate(nodes)
        ]

    def _pod(self, body: dict[str, Any], name: str, rank: int, where: str) -> dict[str, Any]:
        template = body["spec"]["template"]
        labels = {**template["metadata"]["labels"], protocol.LABEL_POD_INDEX: str(rank)}
        spec = {key: value for key, value in template["spec"].items() if key != "schedulingGates"}
        ready = "True" if name in self.ready else "False"
        return {
            "kind": "Pod",
            "metadata": {"name": f"{name}-{rank}", "namespace": "team", "uid": f"{name}-{rank}", "labels": labels},
            "spec": {**spec, "nodeName": where},
            "status": {"conditions": [{"type": "Ready", "status": ready}]},
        }

    def run(self, _: Kubectl, *arguments: str) -> str:
        if arguments[0] == "annotate":
            assert arguments[3:] == (f"{names.RETIRED_ANNOTATION}=true", "--resource-version=7")
            self.sets[arguments[2]]["metadata"]["annotations"][names.RETIRED_ANNOTATION] = "true"
            return ""
        kinds, everywhere = arguments[1], "--all-namespaces" in arguments
        resource = f"{protocol.PLURAL}.{protocol.GROUP}"
        answers: dict[str, Any] = {
            resource: {"items": [self.pool]} if everywhere else self.pool,
            "nodes": {"items": self.nodes},
            "pods": {"items": self.pods()},
            "poddisruptionbudgets": {"items": self.budgets},
        }
        return json.dumps(answers.get(kinds, {"items": [*self.sets.values(), *self.pods()]}))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(Kubectl, "run", lambda kubectl, *arguments: found.run(kubectl, *arguments))
    monkeypatch.setattr(moving, "time", found)
    return found


def applied(capsys: pytest.CaptureFixture[str], code: int) -> dict[str, Any]:
    assert main(["defragment", "llama", "--apply", "--yes", "-o", "json"]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_a_move_is_made_and_every_stage_is_told(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["defragment", "llama", "--apply", "--yes"]) == 0
    out = capsys.readouterr().out
    for words in ("old gets no new requests", "new loads on n2, n3", "old ends its requests", "new serves on n2, n3"):
        assert words in out
    assert out.endswith("1 of 1 moves made\n")
    assert list(cluster.sets) == ["new"]
    assert main(["defragment", "llama", "--apply", "--yes"]) == 0
    assert capsys.readouterr().out == "no move pays\n"


def test_programs_are_told_what_became_of_each_move(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    told = applied(capsys, 0)
    (moved,) = told["moved"]
    assert (moved["group"], moved["successor"], moved["reason"], told["stopped"]) == ("old", "new", "", "")
    assert moved["seconds"] == cluster.now
    assert told["moves"][0]["to"] == ["n2", "n3"]


def test_nothing_moves_unless_somebody_says_yes(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["defragment", "llama"]) == 0
    assert "nothing was moved; --apply" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    assert main(["defragment", "llama", "--apply"]) == 1
    assert "add --yes" in capsys.readouterr().err

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal("no\n"))
    assert main(["defragment", "llama", "--apply"]) == 1
    assert "0 of 1 moves made" in capsys.readouterr().out
    assert names.RETIRED_ANNOTATION not in cluster.sets["old"]["metadata"]["annotations"]
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert main(["defragment", "llama", "--apply"]) == 0
    assert list(cluster.sets) == ["new"]


def test_what_comes_otherwise_ends_it_with_a_reason(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.successor = ("n2", "n0")
    told = applied(capsys, 1)
    assert told["stopped"] == "old: new went to n2, n0, not to n2, n3 as foretold"


def test_what_takes_too_long_ends_it_with_what_is_short(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    short = {"type": "Placed", "status": "False", "reason": "NotEnoughFree", "message": "no GPU is free"}
    short["lastTransitionTime"] = "1970-01-01T00:00:00Z"
    cluster.script = [lambda: cluster.pool["status"].update(conditions=[short])]
    told = applied(capsys, 1)
    assert "not done after 2520 s: the operator opens the successor; no GPU is free" in told["stopped"]
    cluster.pool["status"] = {}
    del cluster.sets["old"]["metadata"]["annotations"][names.RETIRED_ANNOTATION]
    assert applied(capsys, 1)["stopped"].endswith("the operator opens the successor")


def test_a_budget_or_another_proposal_keeps_it_from_beginning(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {protocol.LABEL_POOL: "llama"}
    cluster.budgets = [{"metadata": {"name": "mine"}, "spec": {"selector": {"matchLabels": labels}}, "status": {}}]
    assert "PodDisruptionBudget mine lets no pod" in applied(capsys, 1)["stopped"]
    cluster.budgets = []
    monkeypatch.setattr(moving.Mover, "_obstacle", _forgetful(moving.Mover._obstacle))
    assert "would not pay any more" in applied(capsys, 1)["stopped"]
    assert names.RETIRED_ANNOTATION not in cluster.sets["old"]["metadata"]["annotations"]


def _forgetful(original: Any) -> Any:
    """Return the check as it is when the proposal has changed since."""

    def check(mover: Any, move: Any, observed: Any, existing: Any) -> str:
        mover._again = lambda _: []
        found: str = original(mover, move, observed, existing)
        return found

    return check
