"""One writer and the truth: scaling by subresource, other writers on our objects, refusals, Events, lost status."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from twinpool.localcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

NAME = "truth"
ROLE = {"resources": {"gpu": {"perNode": 0}}, "drainTimeout": "1s"}
POOL = f"{protocol.PLURAL}.{protocol.GROUP}/{NAME}"
CHILDREN = "statefulset,deployment,service,serviceaccount,role,rolebinding"


class Pool:
    """A pool in the test's namespace, served by the installed operator."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def kubectl(self, *arguments: str, **options: Any) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments, **options).stdout

    def json(self, *arguments: str) -> Any:
        return self.cluster.json("-n", self.namespace, *arguments)

    def apply(self, prefill: int | None = 1, decode: int = 1, **spec: Any) -> None:
        roles: dict[str, Any] = {"decode": {**ROLE, "replicas": decode}}
        if prefill is not None:
            roles["prefill"] = {**ROLE, "replicas": prefill}
        body = {"model": {"name": "tiny"}, "engine": {"kind": "simulated"}, **roles, **spec}
        self.create(
            {"apiVersion": protocol.API_VERSION, "kind": protocol.KIND, "metadata": {"name": NAME}, "spec": body}
        )

    def create(self, body: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", input=yaml.safe_dump(body))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json("get", POOL).get("status", {})
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        found = [item for item in self.status().get("conditions", []) if item["type"] == kind]
        return found[0] if found else {"status": "", "reason": "", "message": ""}

    def summary(self, role: str) -> str:
        return str(self.status().get(role, {}).get("summary", ""))

    def await_complete(self, prefill: str, decode: str, seconds: float = 120) -> None:
        def complete() -> bool:
            shown = (self.summary("prefill"), self.summary("decode"), self.condition("Progressing")["reason"])
            return shown == (prefill, decode, "Complete")

        wait_until(complete, seconds, f"prefill {prefill} and decode {decode}")

    def await_reason(self, kind: str, reason: str, seconds: float = 120) -> str:
        wait_until(lambda: self.condition(kind)["reason"] == reason, seconds, f"{kind} says {reason}")
        return str(self.condition(kind)["message"])

    def told(self) -> set[tuple[str, str]]:
        found = self.json("get", "events", "--field-selector", f"involvedObject.kind={protocol.KIND}")["items"]
        return {(item["type"], item["reason"]) for item in found}


@pytest.fixture
def truth(twinpool: Cluster, namespace: str) -> Pool:
    return Pool(twinpool, namespace)


def autoscaler(kind: str, version: str, name: str, least: int) -> dict[str, Any]:
    """Return a HorizontalPodAutoscaler; nothing here measures CPU, so only its least number acts."""
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "scaler"},
        "spec": {
            "scaleTargetRef": {"apiVersion": version, "kind": kind, "name": name},
            "minReplicas": least,
            "maxReplicas": 8,
            "metrics": [{"type": "Resource", "resource": cpu}],
        },
    }


def test_decode_is_scaled_by_subresource_and_prefill_follows_in_the_band(truth: Pool) -> None:
    truth.apply(prefill=1, decode=1, ratio={"min": "1:2", "max": "1:1"})
    truth.await_complete("1/1", "1/1")
    truth.kubectl("scale", POOL, "--replicas=3")
    truth.await_complete("2/2", "3/3")
    assert truth.status()["ratio"] == truth.status()["targetRatio"] == "2:3"
    found = truth.json("get", "pods", "-l", truth.status()["selector"])["items"]
    assert len(found) == 3
    assert {pod["metadata"]["labels"][protocol.LABEL_ROLE] for pod in found} == {"decode"}
    truth.create(autoscaler(protocol.KIND, protocol.API_VERSION, NAME, 4))
    truth.await_complete("2/2", "4/4")
    said = {item["type"]: item["status"] for item in truth.json("get", "hpa", "scaler")["status"]["conditions"]}
    assert said["AbleToScale"] == "True"


def test_an_autoscaler_on_a_child_is_named_and_not_fought(truth: Pool) -> None:
    truth.apply(prefill=None)
    truth.await_complete("", "1/1")
    truth.create(autoscaler("Deployment", "apps/v1", f"{NAME}-router", 2))
    said = truth.await_reason("Progressing", "Contested", 180)
    assert f"keeps changing Deployment {NAME}-router" in said
    assert "kube-controller-manager (subresource scale)" in said
    version = lambda: truth.json("get", "deployment", f"{NAME}-router")["metadata"]["generation"]  # noqa: E731
    before = version()
    wait_until(lambda: truth.json("get", "deployment", f"{NAME}-router")["spec"]["replicas"] == 2, 60, "it is let be")
    assert version() - before <= 1, "nobody fights"
    assert ("Warning", "Contested") in truth.told()
    assert truth.condition("Ready")["status"] == "True"


def test_what_others_own_survives(truth: Pool) -> None:
    truth.apply(prefill=None)
    truth.await_complete("", "1/1")
    deployment = f"deployment/{NAME}-router"
    truth.kubectl("label", deployment, "team=blue")
    truth.kubectl("annotate", deployment, "example.com/note=keep")
    truth.kubectl("rollout", "restart", deployment)
    # A change of ours, applied over theirs.
    truth.apply(prefill=None, routing={"resources": {"memory": "300Mi"}})

    def changed() -> Any:
        body = truth.json("get", deployment)
        (container,) = body["spec"]["template"]["spec"]["containers"]
        return body if container["resources"]["limits"]["memory"] == "300Mi" else None

    body = wait_until(changed, 60, "our change is there")
    assert body["metadata"]["labels"]["team"] == "blue"
    assert body["metadata"]["annotations"]["example.com/note"] == "keep"
    assert "kubectl.kubernetes.io/restartedAt" in body["spec"]["template"]["metadata"]["annotations"]
    truth.await_complete("", "1/1")


def test_a_quota_is_quoted_and_growing_pools_go_on_when_it_is_raised(truth: Pool) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    truth.create(quota)
    truth.apply(prefill=None)
    said = truth.await_reason("Placed", "QuotaExceeded")
    assert "exceeded quota: few" in said
    assert "raise the ResourceQuota" in said
    assert truth.condition("Ready")["status"] == "False"
    wait_until(lambda: ("Warning", "QuotaExceeded") in truth.told(), 30, "it is an Event too")
    truth.create({**quota, "spec": {"hard": {"pods": "10"}}})
    truth.await_complete("", "1/1", 180)


def test_pod_security_is_quoted(truth: Pool) -> None:
    truth.kubectl("label", "namespace", truth.namespace, "pod-security.kubernetes.io/enforce=restricted")
    truth.apply(prefill=None)
    said = truth.await_reason("Placed", "PodSecurityRefused")
    assert "runAsNonRoot" in said
    # What the launcher needs is within the restricted profile; who runs the engine is the image's business.
    truth.apply(
        prefill=None,
        decode=1,
        engine={"kind": "simulated", "env": [{"name": "HOME", "value": "/tmp"}]},
    )
    secure = {"spec": {"securityContext": {"runAsNonRoot": True, "runAsUser": 1000}}}
    patch = {"spec": {"decode": {"podTemplate": secure}}}
    truth.kubectl("patch", POOL, "--type=merge", "-p", json.dumps(patch))
    truth.await_complete("", "1/1", 180)


def test_a_life_in_events(truth: Pool) -> None:
    truth.apply(prefill=None)
    truth.await_complete("", "1/1")
    wait_until(lambda: ("Normal", "Serving") in truth.told(), 30, "Ready is told")
    truth.apply(prefill=None, engine={"kind": "simulated", "args": ["--fault=crash-at-start"]})
    wait_until(lambda: ("Normal", "NewRevision") in truth.told(), 60, "the rollout is told")
    wait_until(lambda: ("Warning", "EngineFailed") in truth.told(), 120, "the crash is told")


def test_replacing_the_pool_and_losing_its_status_change_nothing(truth: Pool) -> None:
    truth.apply(decode=2)
    truth.await_complete("1/1", "2/2")
    uids = lambda: {item["metadata"]["uid"] for item in truth.json("get", f"{CHILDREN},pod")["items"]}  # noqa: E731
    before, status = uids(), truth.status()
    body = truth.json("get", POOL)
    metadata = {"name": NAME, "resourceVersion": body["metadata"]["resourceVersion"]}
    replaced = {key: body[key] for key in ("apiVersion", "kind", "spec")}
    truth.kubectl("replace", "-f", "-", input=yaml.safe_dump({**replaced, "metadata": metadata}))
    truth.kubectl("patch", POOL, "--subresource=status", "--type=json", "-p", '[{"op": "remove", "path": "/status"}]')
    wait_until(lambda: truth.status().get("endpoint"), 60, "the status is back")
    truth.await_complete("1/1", "2/2")
    assert uids() == before

    def timeless(found: dict[str, Any]) -> dict[str, Any]:
        said = [{**item, "lastTransitionTime": ""} for item in found["conditions"]]
        return {**found, "conditions": said}

    assert timeless(truth.status()) == timeless(status)
