"""Rollouts on a real API server: both stages move together, whatever happens in the middle, and what runs stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.cli.__main__ import main
from twinpool.demo.load import Load
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

POOL = "llama"
PREFIX = "serving.twinpool.dev"
OWN = "app.kubernetes.io/managed-by=twinpool"
SLOW = {"kind": "simulated", "args": ["--tokens-per-second=50"]}
STEADY = {"kind": "simulated", "args": ["--tokens-per-second=60"]}


def manifest(prefill: int = 2, decode: int = 3, drain: str = "2s", **spec: Any) -> str:
    role = {"resources": {"gpu": {"perNode": 0}}, "drainTimeout": drain}
    body = {
        "model": {"name": "tiny"},
        "engine": {"kind": "simulated"},
        "prefill": {**role, "replicas": prefill},
        "decode": {**role, "replicas": decode},
        **spec,
    }
    pool = {"apiVersion": f"{PREFIX}/v1alpha1", "kind": "InferencePool", "metadata": {"name": POOL}, "spec": body}
    text: str = yaml.safe_dump(pool)
    return text


class Pool:
    """A pool in the test's namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments, **options).stdout

    def apply(self, text: str) -> None:
        self.kubectl("apply", "-f", "-", input=text)

    def get(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.json("-n", self.namespace, "get", "tpool", POOL)
        return found

    def condition(self, kind: str = "Progressing") -> dict[str, Any]:
        pool = self.get()
        found = [item for item in pool.get("status", {}).get("conditions", []) if item["type"] == kind]
        current = found and found[0]["observedGeneration"] == pool["metadata"]["generation"]
        return found[0] if current else {"status": "", "reason": "", "message": ""}

    def sets(self) -> list[dict[str, Any]]:
        found = self.cluster.json("-n", self.namespace, "get", "statefulset", "-l", OWN)["items"]
        return [item for item in found if f"{PREFIX}/retired" not in item["metadata"]["annotations"]]

    def groups(self) -> Counter[tuple[str, str]]:
        """Return the live groups by role and revision."""
        labels = [item["metadata"]["labels"] for item in self.sets()]
        return Counter((item[f"{PREFIX}/role"], item[f"{PREFIX}/revision"]) for item in labels)

    def names(self) -> set[str]:
        return {item["metadata"]["name"] for item in self.sets()}

    def pods(self) -> set[str]:
        found = self.cluster.json("-n", self.namespace, "get", "pods", "-l", f"{OWN},{PREFIX}/role!=router")["items"]
        return {item["metadata"]["uid"] for item in found}

    def revision(self) -> str:
        return str(self.get()["status"]["revision"])

    def done(self, prefill: int, decode: int) -> bool:
        wanted = {(role, self.revision()): count for role, count in (("prefill", prefill), ("decode", decode))}
        return self.condition()["reason"] == "Complete" and self.groups() == wanted

    def await_done(self, prefill: int = 2, decode: int = 3) -> str:
        wait_until(lambda: self.done(prefill, decode), 150, "every group is of the newest revision and ready")
        return self.revision()


@pytest.fixture
def pool(twinpool: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A pool's namespace, which the command line reaches too."""
    monkeypatch.setenv("KUBECONFIG", str(twinpool.kubeconfig))
    monkeypatch.setenv("PATH", f"{Path(twinpool.kubectl_path).parent}:{os.environ['PATH']}")
    made = Pool(twinpool, namespace)
    yield made
    made.kubectl("delete", "tpool", POOL, "--ignore-not-found", "--wait=false")


def rollout(pool: Pool, *arguments: str) -> int:
    return main(["rollout", *arguments, f"--namespace={pool.namespace}"])


def test_an_update_moves_both_stages_together(pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool.apply(manifest())
    old = pool.await_done()
    update = tmp_path / "update.yaml"
    update.write_text(manifest(engine=SLOW))
    capsys.readouterr()
    assert rollout(pool, "plan", "--file", str(update), "-o", "json") == 0
    foretold = json.loads(capsys.readouterr().out)
    pool.apply(update.read_text())
    seen: list[Counter[str]] = []
    ready: list[tuple[int, int]] = []

    def moved() -> bool:
        groups, status = pool.groups(), pool.get()["status"]
        seen.append(Counter(role for role, _ in groups.elements()))
        ready.append((status["prefill"]["ready"], status["decode"]["ready"]))
        return pool.done(2, 3) and pool.revision() != old

    wait_until(moved, 150, "the update is done")
    assert all(count["prefill"] <= 3 and count["decode"] <= 4 for count in seen), "over the budget"
    assert all(prefill >= 2 and decode >= 3 for prefill, decode in ready), "under the floor"
    assert foretold["revision"] == pool.revision()
    assert foretold["steps"][0]["create"] == {"prefill": 1, "decode": 1}
    assert rollout(pool, "status", POOL) == 0
    assert rollout(pool, "history", POOL, "-o", "json") == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["revision"], row["groups"]) for row in rows] == [(old, 0), (pool.revision(), 5)]
    assert rows[1]["changed"] == ["engine.args"]
    plugin = [pool.cluster.kubectl_path, "twinpool", "rollout", "history", POOL, f"--namespace={pool.namespace}"]
    beside = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    assert pool.revision() in subprocess.run(plugin, env=beside, capture_output=True, text=True, check=True).stdout


def test_an_undo_in_the_middle_keeps_what_is_left_and_fails_no_request(pool: Pool) -> None:
    pool.apply(manifest(drain="30s", engine=STEADY))
    old, before = pool.await_done(), pool.names()
    with Load(pool.cluster, pool.namespace, POOL, "tiny", clients=3) as load:
        pool.apply(manifest(drain="30s", engine=SLOW))
        wait_until(lambda: before - pool.names(), 90, "the first old group goes")
        assert rollout(pool, "undo", POOL) == 0
        assert pool.await_done() == old
        load.more(8)
    assert load.failures == [], f"{len(load.failures)} of {load.ended} failed"
    assert len(before & pool.names()) >= 2, "groups that were left are not made anew"
    assert pool.get()["spec"]["engine"]["args"] == STEADY["args"]


def test_a_paused_rollout_waits_and_goes_on(pool: Pool) -> None:
    pool.apply(manifest(1, 1))
    old, before = pool.await_done(1, 1), pool.names()
    assert rollout(pool, "pause", POOL) == 0
    pool.apply(manifest(1, 2, engine=SLOW, rollout={"paused": True}))
    wait_until(lambda: pool.condition()["reason"] == "RolloutPaused", 60, "it says that it is paused")
    wait_until(lambda: pool.groups() == {("prefill", old): 1, ("decode", old): 2}, 60, "numbers follow nevertheless")
    assert before < pool.names()
    assert rollout(pool, "resume", POOL) == 0
    assert pool.await_done(1, 2) != old


def test_a_bad_update_stops_at_once_and_does_not_block_its_fix(pool: Pool) -> None:
    pool.apply(manifest(1, 2))
    old, before = pool.await_done(1, 2), pool.names()
    never = yaml.safe_load(manifest(1, 2, rollout={"maxSurge": 0, "maxUnavailable": 1}))
    never["spec"]["decode"]["podTemplate"] = {"spec": {"tolerations": [{"operator": "Sometimes"}]}}
    pool.apply(yaml.safe_dump(never))
    wait_until(lambda: pool.condition()["reason"] == "Refused", 60, "the API server's refusal is in the condition")
    assert "tolerations" in pool.condition()["message"]
    assert pool.names() == before, "no group went for pods that can never be made"
    assert pool.condition("Ready")["status"] == "True"
    bad = {"kind": "simulated", "args": ["--no-such-flag"]}
    pool.apply(manifest(1, 2, engine=bad, rollout={"progressDeadline": "5s"}))

    def explained() -> bool:
        found = pool.condition()
        return found["reason"] == "ProgressDeadlineExceeded" and "--no-such-flag" in found["message"]

    wait_until(explained, 90, "the deadline is over, and the engine's own words are in the condition")
    assert before <= pool.names(), "what serves stays"
    assert pool.groups()["decode", pool.revision()] == 1, "one more than wanted, and no more"
    assert rollout(pool, "status", POOL) == 1
    pool.apply(manifest(1, 2, engine=SLOW))
    assert pool.await_done(1, 2) != old


def test_a_restart_replaces_every_group_by_its_like(pool: Pool) -> None:
    pool.apply(manifest(1, 1))
    old, before, pods = pool.await_done(1, 1), pool.names(), pool.pods()
    assert rollout(pool, "restart", POOL) == 0
    wait_until(lambda: pool.revision() != old, 60, "a new revision")
    pool.await_done(1, 1)
    assert not before & pool.names()
    assert not pods & pool.pods()


def test_another_version_of_the_operator_restarts_nothing(pool: Pool) -> None:
    pool.apply(manifest(1, 1))
    old = pool.await_done(1, 1)
    before, pods = {item["metadata"]["name"]: item["spec"] for item in pool.sets()}, pool.pods()
    deployment = ("-n", "twinpool-system", "set", "env", "deployment/twinpool-operator")
    status = ("-n", "twinpool-system", "rollout", "status", "deployment/twinpool-operator", "--timeout=90s")
    pool.cluster.kubectl(*deployment, "TWINPOOL_WORKER_IMAGE=twinpool/worker:next")
    try:
        pool.cluster.kubectl(*status, timeout=100)
        pool.apply(manifest(1, 2))
        assert pool.await_done(1, 2) == old
    finally:
        pool.cluster.kubectl(*deployment, "TWINPOOL_WORKER_IMAGE-")
        pool.cluster.kubectl(*status, timeout=100)
    assert pods < pool.pods()
    specs = {item["metadata"]["name"]: item["spec"] for item in pool.sets()}
    assert {name: specs[name] for name in before} == before
    images = {spec["template"]["spec"]["initContainers"][0]["image"] for spec in specs.values()}
    assert images == {"twinpool/worker:dev"}, "new groups of the old revision are made like the others"


def test_a_revision_that_somebody_deletes_comes_back(pool: Pool) -> None:
    pool.apply(manifest(1, 1))
    old, pods = pool.await_done(1, 1), pool.pods()
    own = f"{OWN},!{PREFIX}/group"
    pool.kubectl("delete", "controllerrevision", "-l", own)
    wait_until(lambda: old in pool.kubectl("get", "controllerrevision", "-l", own, "-o", "name"), 60, "it is back")
    assert pool.await_done(1, 1) == old
    assert pool.pods() == pods
