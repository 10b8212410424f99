"""``twinpool plan`` and ``twinpool explain --placement``: the operator's own decision, before and after."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.cli.__main__ import main
from twinpool.cli.kubectl import Kubectl
from twinpool.core import protocol
from twinpool.core.spec import InferencePool
from twinpool.operator.logic.actions import Apply
from twinpool.operator.logic.observed import Observed
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

SPEC: dict[str, Any] = {
    "model": {"name": "m"},
    "prefill": {"parallelism": {"tensor": 8}},
    "decode": {"parallelism": {"tensor": 16}},
    "placement": {},
}


def manifest(**spec: Any) -> dict[str, Any]:
    metadata = {"name": "llama", "namespace": "team", "uid": "u", "generation": 1}
    body = {"apiVersion": protocol.API_VERSION, "kind": protocol.KIND, "metadata": metadata, "status": {}}
    return {**body, "spec": {key: value for key, value in {**SPEC, **spec}.items() if value is not None}}


def node(name: str, clique: str | None, gpus: str = "8") -> dict[str, Any]:
    labels = {} if clique is None else {"nvidia.com/gpu.clique": clique}
    status = {
        "allocatable": {"nvidia.com/gpu": gpus, "pods": "100"},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    return {"kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}


def pod(name: str, where: str, gpus: str) -> dict[str, Any]:
    container = {"name": "x", "resources": {"limits": {"nvidia.com/gpu": gpus}}}
    metadata = {"name": name, "namespace": "other", "uid": f"uid-{name}"}
    return {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": where, "containers": [container]}}


NODES = [node(f"n{n}", f"c{n // 2}") for n in range(4)]


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str, *documents: Any) -> str:
        path = self.folder / name
        path.write_text(yaml.safe_dump_all(documents))
        return str(path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_a_plan_names_the_node_of_every_rank(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "-f", files("pool.yaml", manifest()), "--nodes", files("nodes.yaml", {"items": NODES})]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    ranks = [line for line in lines if " rank " in line]
    assert len(ranks) == 3
    assert any(line.startswith("prefill llama-prefill-") for line in ranks)
    assert all("(nvlink c" in line for line in ranks)
    start = lines.index("as a tree (GROUP/RANK):")
    tree = [line for line in lines[start + 1 :] if line.startswith(("  nvlink", "    host n"))]
    assert len([line for line in tree if "host" in line]) == 3
    assert all("llama-" in line for line in tree if "host" in line)
    assert any("KV cache between prefill and decode" in line for line in lines)
    assert main([*arguments, "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    decode = next(group for group in told["groups"] if group["role"] == "decode")
    assert [entry["rank"] for entry in decode["ranks"]] == [0, 1]
    assert len({entry["domains"]["nvlink"] for entry in decode["ranks"]}) == 1
    assert told["objective"]["total"] == pytest.approx(sum(v for k, v in told["objective"].items() if k != "total"))


def test_what_is_short_is_told_and_fails(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = files(
        "nodes.yaml", *NODES[1:3], node("n9", None), pod("busy", "n9", "1"), {**pod("gone", "n1", "8"), "spec": {}}
    )
    assert main(["plan", "-f", files("pool.yaml", manifest()), "--nodes", nodes]) == 1
    out = capsys.readouterr().out
    assert "no place: the best NVLink domain" in out
    assert "node n9 has no label" in out
    assert main(["plan", "-f", files("pool.yaml", manifest()), "--nodes", nodes, "-o", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    (short,) = [group["short"] for group in told["groups"] if "short" in group]
    assert short["reason"] == "TopologyUnmet"
    assert any("n9" in text for text in told["labels"])


def test_a_pool_that_does_not_ask_for_it_is_told_so(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = files("nodes.yaml", {"items": [node("n0", None)]})
    pool = files("pool.yaml", manifest(placement=None, prefill=None, decode={"parallelism": {"tensor": 8}}))
    assert main(["plan", "-f", pool, "--nodes", nodes]) == 0
    out = capsys.readouterr().out
    assert out.startswith("the pool leaves its nodes to kube-scheduler")
    assert "rank 0: n0\n" in out


@pytest.mark.parametrize(("name", "words"), [("none.yaml", "cannot be read"), ("empty.yaml", "holds no nodes")])
def test_a_file_without_nodes_is_refused(
    files: Files, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    files("empty.yaml", {"kind": "Pod"})
    assert main(["plan", "-f", files("pool.yaml", manifest()), "--nodes", str(files.folder / name)]) == 1
    assert words in capsys.readouterr().err


class Running:
    """A pool whose groups are on nodes, as kubectl shows it."""

    def __init__(self, places: dict[str, list[str]]) -> None:
        self.stored = manifest()
        self.nodes = NODES
        self.items: list[dict[str, Any]] = []
        observed = Observed(InferencePool.model_validate(self.stored))
        for action in plan(observed, Settings(sees_nodes=True), 0.0).actions:
            if isinstance(action, Apply) and action.kind == "StatefulSet":
                body = dict(action.body)
                role = body["metadata"]["labels"][protocol.LABEL_ROLE]
                self.items.append(body)
                for rank, where in enumerate(places.get(role, [])):
                    self.items.append(self._pod(body, rank, where))

    @staticmethod
    def _pod(body: dict[str, Any], rank: int, where: str) -> dict[str, Any]:
        template = body["spec"]["template"]
        name = f"{body['metadata']['name']}-{rank}"
        labels = {**template["metadata"]["labels"], protocol.LABEL_POD_INDEX: str(rank)}
        spec = {key: value for key, value in template["spec"].items() if key != "schedulingGates"}
        return {
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "team", "uid": name, "labels": labels},
            "spec": {**spec, "nodeName": where},
        }

    def run(self, _: Kubectl, *arguments: str) -> str:
        pods = [item for item in self.items if item["kind"] == "Pod"]
        if arguments[1:] == ("inferencepools.serving.twinpool.dev", "--all-namespaces", "--output=json"):
            return json.dumps({"items": [self.stored]})
        answers = {
            "inferencepools.serving.twinpool.dev": self.stored,
            "nodes": {"items": self.nodes},
            "pods": {"items": [*pods, pod("busy", "n0", "1")]},
        }
        return json.dumps(answers.get(arguments[1], {"items": self.items}))


def running(monkeypatch: pytest.MonkeyPatch, places: dict[str, list[str]]) -> Running:
    found = Running(places)
    monkeypatch.setattr(Kubectl, "run", lambda kubectl, *arguments: found.run(kubectl, *arguments))
    return found


def test_a_running_pool_is_compared_with_the_best_layout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running(monkeypatch, {"prefill": ["n1"], "decode": ["n2", "n3"]})
    assert main(["explain", "llama", "--placement"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("no better layout was found")
    running(monkeypatch, {"prefill": ["n3"], "decode": ["n1", "n2"]})
    assert main(["explain", "llama", "--placement", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["best"] < told["objective"]["total"], "its tensor unit is torn"
    assert "tensor" in [item["wish"] for item in told["compromises"]]
    assert main(["explain", "llama", "--placement"]) == 0
    out = capsys.readouterr().out
    assert "placed anew it could be" in out
    assert "not kept: 1 of 1 tensor-parallel units of llama-decode-" in out
    assert "span cluster, wanted within nvlink (placement.tensor)" in out


def test_moves_that_pay_are_proposed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    running(monkeypatch, {"prefill": ["n1"], "decode": ["n2", "n3"]})
    assert main(["defragment", "llama"]) == 0
    assert capsys.readouterr().out == "no move pays\n"
    found = running(monkeypatch, {"decode": ["n1", "n2"]})
    found.nodes = [*NODES, node("n4", "c2"), node("n5", "c2")]
    for least, count in (("0.05", 1), ("9", 0)):
        assert main(["defragment", "llama", "--least", least, "-o", "json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert len(told["moves"]) == count
    assert main(["defragment", "llama"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("decode llama-decode-")
    assert ": n1, n2 -> n4, n5: wins " in lines[0]
    assert "tensor-parallel units over several nodes" in lines[1]
    assert lines[2].startswith("in all: ")
    assert lines[3].startswith("nothing was moved")


def test_slow_links_of_any_pool_are_told_and_avoided(
    files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = {"nodes": ["n2", "n3"], "level": "nvlink", "measured": 1, "promised": 9, "since": "1970-01-01T00:00:00Z"}
    found = Running({"prefill": ["n1"], "decode": ["n2", "n3"]})
    found.stored["status"] = {"slowLinks": [link]}
    monkeypatch.setattr(Kubectl, "run", lambda kubectl, *arguments: found.run(kubectl, *arguments))
    assert main(["explain", "llama", "--placement", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["objective"]["slow"] == 16.0
    listed = {"items": [*NODES, {**found.stored, "kind": protocol.KIND}]}
    assert main(["plan", "-f", files("pool.yaml", manifest()), "--nodes", files("nodes.yaml", listed)]) == 0
    out = capsys.readouterr().out
    assert "0.00  groups over links that were measured too slow" in out
    assert "rank 0: n0" in out, "the other domain"


def measured(level: str, pairs: int, bandwidth: int) -> dict[str, Any]:
    since = "1970-01-01T00:00:00Z"
    link = {"level": level, "pairs": pairs, "bandwidth": bandwidth, "latency": 1e-6}
    return {**link, "configured": 450_000_000_000, "since": since}


def test_what_was_measured_counts_and_stands_beside_what_was_configured(
    files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"prefill": ["n1"], "decode": ["n2", "n3"]}
    found = running(monkeypatch, places)
    assert main(["explain", "llama", "--placement", "-o", "json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["links"] == []
    found.stored["status"] = {"links": [measured("nvlink", 6, 45_000_000_000), measured("host", 2, 9_000_000_000)]}
    assert main(["explain", "llama", "--placement", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    by_level = {link["level"]: link for link in told["links"]}
    assert (by_level["nvlink"]["used"], by_level["nvlink"]["configured"]) == (45e9, 450e9)
    assert by_level["nvlink"]["measured"]["pairs"] == 6
    assert by_level["host"]["used"] == 450e9, "two pairs do not count"
    assert told["objective"]["tensor"] > before["objective"]["tensor"], "the link that it has is slower than was said"
    assert main(["explain", "llama", "--placement"]) == 0
    out = capsys.readouterr().out
    assert "links of nvlink: 45 GB/s counts; 45 GB/s measured (median of 6 pairs), 450 GB/s configured" in out
    assert "links of host: 450 GB/s counts; 9 GB/s measured (median of 2 pairs, counts from 3 on)" in out
    assert "links of rack: 45 GB/s, as those inside it, 50 GB/s configured" in out
    listed = {"items": [*NODES, {**found.stored, "kind": protocol.KIND}]}
    assert main(["plan", "-f", files("pool.yaml", manifest()), "--nodes", files("nodes.yaml", listed)]) == 0
    assert "links of nvlink: 45 GB/s counts" in capsys.readouterr().out
    found = running(monkeypatch, {"decode": ["n1", "n2"]})
    found.nodes = [*NODES, node("n4", "c2"), node("n5", "c2")]
    wins = []
    for links in ([], [measured("nvlink", 6, 45_000_000_000)]):
        found.stored["status"] = {"links": links}
        assert main(["defragment", "llama", "-o", "json"]) == 0
        wins += [move["wins"] for move in json.loads(capsys.readouterr().out)["moves"]]
    assert wins[1] < wins[0], "a domain whose links are slower is worth less"


def test_links_are_told_as_to_the_operator(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "-f", files("pool.yaml", manifest()), "--nodes", files("nodes.yaml", {"items": NODES})]
    assert main([*given, "--links", "rack=25"]) == 0
    capsys.readouterr()
    assert main([*given, "--links", "rack 25G"]) == 1
    assert "the link 'rack 25G' is not understood" in capsys.readouterr().err


def test_a_group_that_waits_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    running(monkeypatch, {"prefill": ["n2"]})
    assert main(["explain", "llama", "--placement"]) == 0
    out = capsys.readouterr().out
    assert "decode llama-decode-" in out
    assert "no place: the best NVLink domain" in out
    running(monkeypatch, {"decode": ["n2", "n3"]})
    assert main(["explain", "llama", "--placement"]) == 0
    assert "not on nodes yet" in capsys.readouterr().out


def test_a_plan_for_a_cluster_keeps_what_runs(
    files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running(monkeypatch, {"prefill": ["n1"], "decode": ["n2", "n3"]})
    more = manifest(prefill={"parallelism": {"tensor": 8}, "replicas": 2})
    assert main(["plan", "-f", files("pool.yaml", more)]) == 1
    out = capsys.readouterr().out
    assert "rank 0: n1" in out
    assert "no place" in out, "n0 has 7 GPUs left"
