"""``twinpool rollout``: what it reads of a cluster, what it prints, and what it asks kubectl to change."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.cli import rollout as commands
from twinpool.cli.__main__ import main
from twinpool.cli.kubectl import Kubectl, KubectlFailed
from twinpool.core import protocol
from twinpool.core.spec import InferencePool
from twinpool.operator.logic.observed import Observed
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.revision import Revision, inputs, rendered, revision_object, target
from twinpool.operator.logic.settings import Settings
from twinpool.operator.logic.worker_objects import group_set

if TYPE_CHECKING:
    from pathlib import Path

SPEC: dict[str, Any] = {"model": {"name": "m"}, "prefill": {"replicas": 1}, "decode": {"replicas": 2}}
SLOW = {"engine": {"args": ["--slow"]}}


def manifest(**spec: Any) -> dict[str, Any]:
    """Return a pool as the API server holds it."""
    metadata = {"name": "llama", "namespace": "team", "uid": "u", "generation": 3, "resourceVersion": "7"}
    return {
        "apiVersion": protocol.API_VERSION,
        "kind": protocol.KIND,
        "metadata": {**metadata, "annotations": {"kept": "x"}},
        "spec": copy.deepcopy({**SPEC, **spec}),
        "status": {},
    }


class FakeCluster:
    """What kubectl shows of one pool whose groups are ready, and what it was asked to change."""

    def __init__(self, stored: dict[str, Any], *revisions: Revision, run: str) -> None:
        self.stored = stored
        self.patches: list[tuple[str, Any]] = []
        self.items = [revision_object(self.pool, item) for item in revisions]
        self.missing = False
        chosen = {item.name: item for item in revisions}
        for role, count in (("prefill", 1), ("decode", 2)):
            for n in range(count if run else 0):
                self._add_group(role, f"{role}-{n}", chosen[run])

    @property
    def pool(self) -> InferencePool:
        return InferencePool.model_validate(self.stored)

    def _add_group(self, role: str, name: str, revision: Revision) -> None:
        body = group_set(self.pool, role, revision.templates[role], revision.name, 1, name)
        labels = body["spec"]["template"]["metadata"]["labels"]
        conditions = [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}]
        pod = {"kind": "Pod", "metadata": {"name": f"{name}-0", "labels": labels}, "status": {"conditions": conditions}}
        self.items += [body, pod]

    def run(self, _: Kubectl, *arguments: str) -> str:
        if arguments[0] == "patch":
            kind, patch = arguments[-2:]
            self.patches.append((kind, json.loads(patch.removeprefix("--patch="))))
            return ""
        if self.missing:
            raise KubectlFailed('Error from server (NotFound): "llama" not found')
        found = self.stored if arguments[1] == "inferencepools.serving.twinpool.dev" else {"items": self.items}
        return json.dumps(found)


def revisions() -> tuple[Revision, Revision]:
    old = InferencePool.model_validate(manifest())
    new = InferencePool.model_validate(manifest(**SLOW))
    first = target(Observed(old), (), (), Settings())
    return first, Revision("second", 2, inputs(new), rendered(new, Settings()))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """A pool whose spec was just changed: every group is still of the old revision."""
    first, second = revisions()
    fake = FakeCluster(manifest(**SLOW), first, second, run=first.name)
    monkeypatch.setattr(Kubectl, "run", lambda kubectl, *arguments: fake.run(kubectl, *arguments))
    return fake


def test_the_plan_is_that_of_the_operator(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "plan", "llama", "-o", "json"]) == 0
    foretold = json.loads(capsys.readouterr().out)
    assert foretold["revision"] == "second"
    assert foretold["steps"][0]["create"] == {"prefill": 1, "decode": 1}
    assert foretold["steps"][-1]["ready"] == [
        {"role": "prefill", "revision": "second", "groups": 1},
        {"role": "decode", "revision": "second", "groups": 2},
    ]
    assert {name for step in foretold["steps"] for name in step["retire"]} == {"prefill-0", "decode-0", "decode-1"}


def test_the_plan_in_words(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "plan", "llama"]) == 0
    first, header, begin, *steps = capsys.readouterr().out.splitlines()
    assert first.startswith("llama: to revision second")
    assert "prefill 1 to 2, decode 2 to 3" in first
    assert header.split()[:2] == ["STEP", "MAKE"]
    assert "prefill 1+0, decode 2+0" in begin
    assert "1 prefill, 1 decode" in steps[0]
    assert "prefill 0+1, decode 0+2" in steps[-1]


def test_a_plan_without_surge_says_that_it_falls_below_the_floor(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.stored["spec"]["rollout"] = {"maxSurge": 0, "maxUnavailable": 1}
    assert main(["rollout", "plan", "llama"]) == 0
    assert "(below the floor)" in capsys.readouterr().out


def test_the_plan_of_a_manifest(cluster: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(json.dumps(manifest()))
    assert main(["rollout", "plan", "-f", str(file)]) == 0
    assert "nothing to do" in capsys.readouterr().out
    cluster.missing = True
    assert main(["rollout", "plan", "-f", str(file), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][0]["create"] == {"prefill": 1, "decode": 2}


@pytest.mark.parametrize("text", ["{", "kind: ConfigMap", "- 1"])
def test_a_file_without_a_pool_is_refused(
    cluster: FakeCluster, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(text)
    assert main(["rollout", "plan", "-f", str(file)]) == 1
    assert "pool.yaml" in capsys.readouterr().err


def test_a_plan_needs_a_pool_or_a_file(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "plan"]) == 1
    assert "--file" in capsys.readouterr().err


def test_a_manifest_that_cannot_be_read_is_named(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.stored["spec"]["decode"] = {"replicas": "many"}
    assert main(["rollout", "history", "llama"]) == 1
    assert "pool llama: spec.decode.replicas" in capsys.readouterr().err


def test_history(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "history", "llama", "-n", "team"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["NUMBER", "REVISION", "GROUPS", "CHANGED"]
    assert first.split()[2:] == ["3"]
    assert second.split() == ["2", "second", "0", "engine"]
    assert main(["rollout", "history", "llama", "-o", "json"]) == 0
    assert [row["groups"] for row in json.loads(capsys.readouterr().out)] == [3, 0]


def test_undo_puts_back_what_pods_are_made_of_and_nothing_else(cluster: FakeCluster) -> None:
    cluster.stored["spec"]["decode"]["replicas"] = 5
    cluster.stored["metadata"]["annotations"][protocol.ANNOTATION_RESTART] = "now"
    assert main(["rollout", "undo", "llama", "--to", "1"]) == 0
    ((kind, patch),) = cluster.patches
    assert kind == "--type=json"
    assert patch == [
        {"op": "test", "path": "/metadata/generation", "value": 3},
        {"op": "add", "path": "/spec/model", "value": {"name": "m"}},
        {"op": "remove", "path": "/spec/engine"},
        {"op": "add", "path": "/spec/prefill", "value": {}},
        {"op": "add", "path": "/spec/decode", "value": {"replicas": 5}},
        {"op": "remove", "path": "/metadata/annotations/serving.twinpool.dev~1restart"},
    ]


def test_undo_puts_back_every_block_that_pods_are_made_of(cluster: FakeCluster) -> None:
    cluster.stored["spec"] |= {
        "speculation": {"method": "ngram"},
        "tracing": {"endpoint": "http://collector:4317"},
    }
    assert main(["rollout", "undo", "llama", "--to", "1"]) == 0
    ((_, patch),) = cluster.patches
    removed = {step["path"] for step in patch if step["op"] == "remove"}
    assert removed == {f"/spec/{block}" for block in ("engine", "speculation", "tracing")}


@pytest.mark.parametrize("annotated", [True, False])
def test_undo_to_a_revision_that_was_a_restart(cluster: FakeCluster, annotated: bool) -> None:
    first, _ = revisions()
    restarted = Revision("third", 3, {**first.inputs, "restart": "then"}, first.templates)
    cluster.items += [revision_object(cluster.pool, restarted)]
    if not annotated:
        del cluster.stored["metadata"]["annotations"]
    assert main(["rollout", "undo", "llama", "--to", "third"]) == 0
    ((_, patch),) = cluster.patches
    restart = {"op": "add", "path": "/metadata/annotations/serving.twinpool.dev~1restart", "value": "then"}
    empty = {"op": "add", "path": "/metadata/annotations", "value": {}}
    assert patch[-1] == restart
    assert (empty in patch) is not annotated


def test_undo_to_a_named_revision(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "undo", "llama", "--to", "2"]) == 0
    assert "put back to revision second" in capsys.readouterr().out
    assert main(["rollout", "undo", "llama", "--to", "x"]) == 1
    assert "history" in capsys.readouterr().err


def test_undo_without_an_earlier_revision(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.items = [item for item in cluster.items if item["metadata"]["name"] == "llama-second"]
    assert main(["rollout", "undo", "llama"]) == 1
    assert "no earlier revision" in capsys.readouterr().err


def test_pause_resume_and_restart(cluster: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.stored["spec"]["rollout"] = {"paused": True}
    for command in ("pause", "resume", "restart"):
        assert main(["rollout", command, "llama", "--context", "here"]) == 0
    paused, resumed, restarted = (patch for _, patch in cluster.patches)
    assert paused == {"spec": {"rollout": {"paused": True}}}
    assert resumed == {"spec": {"rollout": {"paused": False}}}
    assert restarted["metadata"]["annotations"][protocol.ANNOTATION_RESTART].endswith("Z")
    assert "resume llama" in capsys.readouterr().out, "a restart that waits says so"


def with_status(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    observed = Observed(InferencePool.model_validate(body))
    status = {**plan(observed, Settings(), 0.0).status, **changes}
    return {**body, "status": status}


def said(reason: str, status: str) -> list[dict[str, str]]:
    return [{"type": "Progressing", "status": status, "reason": reason, "message": "words"}]


def test_progress_in_one_line() -> None:
    body = with_status(manifest(), conditions=said("Waiting", "True"))
    line, done = commands.progress(body)
    assert line.endswith("0 of 1 prefill updated, 0 ready, 0 of 2 decode updated, 0 ready: words")
    assert done is None
    assert commands.progress(with_status(manifest(), conditions=said("Complete", "False")))[1] is True
    assert commands.progress(with_status(manifest(), conditions=said("ImagePullFailed", "False")))[1] is False
    assert commands.progress(with_status(manifest(), observedGeneration=2))[1] is None
    assert commands.progress(manifest())[0] == "llama: waiting for the operator to see the newest spec"


def test_status_watches_until_it_is_done(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = iter([("Waiting", "True"), ("Waiting", "True"), ("Complete", "False")])

    def move_on(_: float = 0) -> None:
        cluster.stored = with_status(manifest(), conditions=said(*next(reasons, ("Waiting", "True"))))

    move_on()
    monkeypatch.setattr(commands.time, "sleep", move_on)
    assert main(["rollout", "status", "llama"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1, "what did not change is not said again"
    cluster.stored = with_status(manifest(), conditions=said("ProgressDeadlineExceeded", "False"))
    assert main(["rollout", "status", "llama"]) == 1
    cluster.stored = with_status(manifest(), conditions=said("Waiting", "True"))
    assert main(["rollout", "status", "llama", "--no-watch"]) == 0
    assert main(["rollout", "status", "llama", "--timeout", "1ms"]) == 1


def test_kubectl_is_asked_with_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "kubectl"
    program.write_text(
        '#!/bin/sh\n[ "$3" = get ] || { echo "no such verb" >&2; exit 1; }\necho "{\\"args\\": \\"$*\\"}"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Kubectl("team", "here").get("pods", "one")
    assert found == {"args": "--context=here --namespace=team get pods one --output=json"}
    with pytest.raises(KubectlFailed, match="no such verb"):
        Kubectl("team", "here").run("fly")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(KubectlFailed, match="not on the PATH"):
        Kubectl().run("get")
