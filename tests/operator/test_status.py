"""The status says what is, in words, and its times move only when a statement does."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core.protocol import MOST_ADAPTERS
from twinpool.core.status import InferencePoolStatus
from twinpool.operator.logic.loading import Weights
from twinpool.operator.logic.observed import ContainerView, Refusal, Termination, timestamp
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.router_objects import endpoint, router_config, router_objects
from twinpool.operator.logic.settings import Settings
from twinpool.operator.logic.status import ratio, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]


def say(cluster: Any, **observed: Any) -> dict[str, Any]:
    """Return the status that would be written now."""
    seen = dataclasses.replace(cluster.observed(), **observed)
    return dict(plan(seen, Settings(), cluster.now).status)


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}


def message(status: dict[str, Any], kind: str) -> str:
    (found,) = [item["message"] for item in status["conditions"] if item["type"] == kind]
    return str(found)


def running(model: Any, pool: InferencePool) -> Any:
    cluster = model(pool)
    cluster.settle()
    return cluster


def change_pods(cluster: Any, role: str, **fields: Any) -> None:
    cluster.pods = {
        name: dataclasses.replace(pod, **fields) if pod.role == role else pod for name, pod in cluster.pods.items()
    }


def test_slow_links_stay_in_the_status(make_pool: Make, model_cluster: Any) -> None:
    pool = make_pool()
    assert "slowLinks" not in say(running(model_cluster, pool))
    link = {"nodes": ["a", "b"], "level": "rack", "measured": 1, "promised": 9, "since": "2026-01-01T00:00:00Z"}
    known = InferencePoolStatus.model_validate({"slowLinks": [link]})
    cluster = running(model_cluster, pool)
    cluster.now = 1_767_225_600.0 + 60
    observed = dataclasses.replace(cluster.observed(), pool=pool.model_copy(update={"status": known}))
    assert plan(observed, Settings(), cluster.now).status["slowLinks"] == [link]


def test_a_group_that_loads_says_how_far_it_is(make_pool: Make, model_cluster: Any) -> None:
    cluster = running(model_cluster, make_pool())
    cluster.set_ready(False)
    starting = [dataclasses.replace(pod, phase="Running", address="10.0.0.1") for pod in cluster.observed().pods]
    told = {pod.uid: Weights("downloading", 10**9, 4 * 10**9) for pod in starting if pod.role == "decode"}
    observed = dataclasses.replace(cluster.observed(), pods=tuple(starting), weights=told)
    status = plan(observed, Settings(), cluster.now).status
    (entry,) = status["loading"]
    assert (entry["stage"], entry["bytes"], entry["total"]) == ("downloading", 10**9, 4 * 10**9)
    assert f"group {entry['group']} downloads weights: 1.0 of 4.0 GB" in message(status, "Progressing")
    assert InferencePoolStatus.model_validate(status).loading


def test_a_pool_that_serves(make_pool: Make, model_cluster: Any) -> None:
    status = say(running(model_cluster, make_pool({"decode": {"replicas": 2}, "objectives": {"itl": "40ms"}})))
    assert conditions(status) == {
        "Ready": ("True", "Serving"),
        "Progressing": ("False", "Complete"),
        "Placed": ("True", "PodsPlaced"),
        "Routable": ("True", "Routable"),
        "HandoffWorking": ("Unknown", "NotMeasured"),
        "WithinObjectives": ("Unknown", "NotMeasured"),
    }
    assert status["decode"] == {"desired": 2, "created": 2, "ready": 2, "routable": 2, "updated": 2, "summary": "2/2"}
    assert status["router"]["summary"] == "1/1"
    assert status["ratio"] == "1:2"
    assert status["targetRatio"] == "1:2"
    assert status["servingRevision"] == status["revision"]
    assert status["selector"] == (
        "serving.twinpool.dev/pool=demo,serving.twinpool.dev/role=decode,apps.kubernetes.io/pod-index=0"
    )
    assert status["endpoint"] == "http://demo-router.team.svc"
    assert status["objectives"] == {"itl": "40ms", "percentile": 99}
    assert status["observedGeneration"] == 1


def test_an_aggregated_pool_has_no_handoff_and_no_ratio(make_pool: Make, model_cluster: Any) -> None:
    status = say(running(model_cluster, make_pool(prefill=None)))
    assert "HandoffWorking" not in conditions(status)
    assert "ratio" not in status
    assert "prefill" not in status
    assert conditions(status)["Ready"] == ("True", "Serving")


def test_a_new_pool(make_pool: Make, model_cluster: Any) -> None:
    status = say(model_cluster(make_pool()))
    assert conditions(status)["Progressing"] == ("True", "Waiting")
    assert "0 of 1 prefill groups" in message(status, "Progressing")
    assert "0 of 1 router pods" in message(status, "Progressing")
    assert conditions(status)["Placed"] == ("Unknown", "Scheduling")
    assert conditions(status)["Ready"] == ("False", "RouterNotReady")


@pytest.mark.parametrize(
    ("role", "reason"), [("prefill", "NoPrefillReady"), ("decode", "NoDecodeReady"), ("router", "RouterNotReady")]
)
def test_what_is_missing_is_named(make_pool: Make, model_cluster: Any, role: str, reason: str) -> None:
    cluster = running(model_cluster, make_pool())
    change_pods(cluster, role, ready=False)
    assert conditions(say(cluster))["Ready"] == ("False", reason)


def test_a_crash_shows_everywhere_with_the_last_lines(make_pool: Make, model_cluster: Any) -> None:
    cluster = running(model_cluster, make_pool())
    ended = Termination("Error", 1, "ValueError: no such model")
    change_pods(cluster, "decode", ready=False, containers=(ContainerView("engine", "i", terminated=ended),))
    status = say(cluster)
    assert conditions(status)["Ready"] == ("False", "EngineFailed")
    assert conditions(status)["Progressing"] == ("False", "EngineFailed")
    assert conditions(status)["Routable"] == ("False", "NoDecodeReady")
    for kind in ("Ready", "Progressing", "Routable"):
        assert "ValueError: no such model" in message(status, kind)


def test_the_pool_is_not_ready_while_one_of_the_newest_pods_crashes(make_pool: Make, model_cluster: Any) -> None:
    cluster = running(model_cluster, make_pool({"decode": {"replicas": 2}}))
    name = min(name for name, pod in cluster.pods.items() if pod.role == "decode")
    broken = ContainerView("engine", "i", last_terminated=Termination("Error", 1, ""))
    cluster.pods[name] = dataclasses.replace(cluster.pods[name], ready=False, containers=(broken,))
    assert conditions(say(cluster))["Routable"][0] == "True"
    assert conditions(say(cluster))["Ready"] == ("False", "EngineFailed")


def test_the_scheduler_is_quoted(make_pool: Make, model_cluster: Any) -> None:
    cluster = running(model_cluster, make_pool())
    change_pods(cluster, "prefill", ready=False, scheduled=False, scheduler_message="0/2 nodes have a GPU")
    assert conditions(say(cluster))["Placed"] == ("False", "Unschedulable")
    assert "0/2 nodes have a GPU" in message(say(cluster), "Placed")


def test_a_pod_that_the_scheduler_has_not_seen(make_pool: Make, model_cluster: Any) -> None:
    cluster = running(model_cluster, make_pool())
    change_pods(cluster, "prefill", ready=False, scheduled=None)
    assert conditions(say(cluster))["Placed"] == ("Unknown", "Scheduling")


@pytest.mark.parametrize(
    ("spec", "field"), [({"decode": {"replicas": 0}}, "decode.replicas"), ({"routing": {"replicas": 0}}, "routing")]
)
def test_scaled_to_zero(make_pool: Make, model_cluster: Any, spec: dict[str, Any], field: str) -> None:
    status = say(running(model_cluster, make_pool(spec)))
    assert conditions(status)["Ready"] == ("False", "ScaledToZero")
    assert field in message(status, "Ready")


def test_without_prefill_groups_decode_serves_alone(make_pool: Make, model_cluster: Any) -> None:
    status = say(running(model_cluster, make_pool({"prefill": {"replicas": 0}})))
    assert conditions(status)["Ready"] == ("True", "Serving")


def test_a_pair_needs_one_revision(make_pool: Make, model_cluster: Any) -> None:
    cluster = running(model_cluster, make_pool())
    cluster.pool = make_pool({"engine": {"args": ["--new"]}})
    cluster.reconcile()
    cluster.run_controllers()
    old = {group.label("serving.twinpool.dev/revision") for group in cluster.sets().values()} - {
        say(cluster)["revision"]
    }
    cluster.set_ready(True, lambda pod: pod.role == "decode")
    cluster.set_ready(False, lambda pod: pod.role == "prefill" and pod.revision in old)
    cluster.set_ready(True, lambda pod: pod.role == "prefill" and pod.revision not in old)
    cluster.set_ready(False, lambda pod: pod.role == "decode" and pod.revision not in old)
    cluster.reconcile()
    assert conditions(say(cluster))["Routable"] == ("False", "NoPair")
    assert say(cluster)["servingRevision"] in old


def test_what_a_group_waits_for_behind_its_gate_is_said(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool())
    for _ in range(2):
        cluster.reconcile()
        cluster.run_controllers()
    cluster.set_ready()
    assert "router pod demo-router-0 does not answer" in message(say(cluster, reports={}), "Progressing")


def test_a_role_of_one_group_is_said_to_be_evictable(make_pool: Make, model_cluster: Any) -> None:
    status = say(running(model_cluster, make_pool({"prefill": {"replicas": 2}})))
    assert "decode has one group, so evicting it" in message(status, "Routable")
    status = say(running(model_cluster, make_pool({"prefill": {"replicas": 2}, "decode": {"replicas": 2}})))
    assert "evict" not in message(status, "Routable")


def test_a_refused_object_is_quoted(make_pool: Make, model_cluster: Any) -> None:
    cluster = running(model_cluster, make_pool())
    status = say(cluster, refusals=(Refusal("StatefulSet", "demo-decode-x", "spec.x: unknown field"),))
    assert conditions(status)["Progressing"] == ("False", "Refused")
    assert "StatefulSet demo-decode-x: spec.x: unknown field" in message(status, "Progressing")


def test_leaving_groups_are_a_change(make_pool: Make, model_cluster: Any) -> None:
    cluster = running(model_cluster, make_pool({"decode": {"replicas": 2}}))
    cluster.pool = make_pool()
    cluster.reconcile()
    cluster.run_controllers()
    assert conditions(say(cluster))["Progressing"] == ("True", "Waiting")
    assert "1 groups are to go" in message(say(cluster), "Progressing")


def test_a_repair_is_a_change(make_pool: Make, model_cluster: Any) -> None:
    cluster = running(model_cluster, make_pool())
    del cluster.objects["Role", "demo-router"]
    assert conditions(say(cluster))["Progressing"] == ("True", "Changing")


def test_times_move_only_with_the_status(make_pool: Make, model_cluster: Any) -> None:
    cluster = running(model_cluster, make_pool())
    before = {item["type"]: item["lastTransitionTime"] for item in say(cluster)["conditions"]}
    cluster.now += 1000
    change_pods(cluster, "decode", ready=False)
    after = {item["type"]: item["lastTransitionTime"] for item in say(cluster)["conditions"]}
    assert after["Placed"] == before["Placed"]
    assert after["Ready"] == timestamp(cluster.now)


def test_a_pool_that_cannot_be_read_keeps_the_rest_of_its_status() -> None:
    status = unreadable({"revision": "r"}, 3, "spec.decode: missing", 0.0)
    assert conditions(status) == {"Ready": ("False", "InvalidSpec")}
    assert status["revision"] == "r"
    assert status["observedGeneration"] == 3
    again = unreadable(status, 3, "spec.decode: missing", 99.0)
    assert again == status


@pytest.mark.parametrize(("pair", "text"), [((0, 0), "0:0"), ((2, 4), "1:2"), ((3, 2), "3:2"), ((0, 4), "0:1")])
def test_ratio(pair: tuple[int, int], text: str) -> None:
    assert ratio(*pair) == text


def test_the_endpoint_names_an_odd_port(make_pool: Make) -> None:
    assert endpoint(make_pool({"routing": {"service": {"port": 8080}}})) == "http://demo-router.team.svc:8080"


def test_secrets_of_the_routers_are_mounted_where_they_look(make_pool: Make) -> None:
    routing = {"auth": {"secretRef": {"name": "api-keys"}}, "tls": {"secretRef": {"name": "front"}}}
    pool = make_pool({"routing": routing})
    (deployment,) = (body for body in router_objects(pool, Settings(), 0) if body["kind"] == "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    assert [(v["name"], v["secret"]["secretName"]) for v in spec["volumes"]] == [("keys", "api-keys"), ("tls", "front")]
    mounts = spec["containers"][0]["volumeMounts"]
    assert [(m["name"], m["mountPath"]) for m in mounts] == [("keys", "/twinpool-keys"), ("tls", "/twinpool-tls")]
    assert all(mount["readOnly"] for mount in mounts)
    assert (router_config(pool).auth, router_config(pool).tls) == (True, True)
    assert endpoint(pool) == "https://demo-router.team.svc:80"
    assert endpoint(make_pool({"routing": {**routing, "service": {"port": 443}}})) == "https://demo-router.team.svc"
    plain = next(body for body in router_objects(make_pool(), Settings(), 0) if body["kind"] == "Deployment")
    assert "volumes" not in plain["spec"]["template"]["spec"]


def test_what_the_routers_are_told(make_pool: Make) -> None:
    assert router_config(make_pool()).on_prefill_failure == "retry-then-local"
    routing, handoff = {"policy": "random"}, {"onPrefillFailure": "fail"}
    told = router_config(make_pool({"prefill": {"drainTimeout": "10m"}, "routing": routing, "handoff": handoff}))
    assert told.on_prefill_failure == "fail"
    assert (told.models, told.disaggregated, told.connector) == (("acme/model",), True, "nixl")
    queue = {"concurrency": 64, "max": 0, "timeout": "500ms", "priorities": True, "hold": "2m"}
    queued = router_config(make_pool({"routing": {"queue": queue}, "objectives": {"ttft": "800ms"}}))
    assert (queued.queue_concurrency, queued.queue_max) == (64, 0)
    assert (queued.queue_timeout, queued.queue_priorities, queued.queue_hold) == (0.5, True, 120.0)
    assert (queued.ttft, router_config(make_pool()).queue_max) == (0.8, 1024)
    ranks = {"decode": {"parallelism": {"data": 2}, "engine": {"args": ["--max-num-seqs=32"]}}}
    assert (router_config(make_pool(ranks)).sequences, router_config(make_pool()).sequences) == (64, 0)
    many = [{"name": f"a{number}", "source": f"hf://o/a{number}"} for number in range(9)]
    model = {"name": "acme/model", "adapters": many}
    adapted = router_config(make_pool(model=model))
    assert adapted.adapter_slots == MOST_ADAPTERS
    assert adapted.adapter_sources == tuple(entry["source"].partition("://")[2] for entry in many)
    assert router_config(make_pool(model={**model, "adapters": many[:8]})).adapter_slots == 0, "all are kept"
    for args, slots in ((["--max-loras=2"], 2), (["--max-loras", "16"], 0)):
        assert router_config(make_pool(model=model, engine={"args": args})).adapter_slots == slots
    auth = {"secretRef": {"name": "k"}, "limit": {"requestsPerMinute": 60}}
    keyed = router_config(make_pool({"routing": {"auth": auth}}))
    assert (keyed.auth, keyed.key_requests, keyed.key_tokens) == (True, 60, 0)
    sized = make_pool({"routing": {"resources": {"cpu": "3500m"}, "accessLog": {"percent": 5}}})
    assert (router_config(sized).processes, router_config(sized).access_log) == (3, 0.05)
    assert router_config(make_pool({"routing": {"resources": {"cpu": "500m"}}})).processes == 1
    traced = router_config(make_pool({"tracing": {"endpoint": "http://c:4318/", "sampling": 0.2}}))
    assert (traced.tracing_url, traced.tracing_sampling) == ("http://c:4318/v1/traces", 0.2)
    assert router_config(make_pool({"tracing": {"endpoint": "http://c/v1/traces"}})).tracing_url == "http://c/v1/traces"
    assert router_config(make_pool()).tracing_url == ""
    aliased = make_pool({"model": {"name": "acme/model", "aliases": ["small", "gpt-4o"]}})
    assert router_config(aliased).models == ("acme/model", "small", "gpt-4o")
    assert (told.policy, told.drain_timeout) == ("random", 615.0)
    alone = router_config(make_pool(prefill=None))
    assert (alone.disaggregated, alone.connector) == (False, None)


def test_a_group_that_routers_do_not_list_yet_is_ready_and_not_routable(make_pool: Make, model_cluster: Any) -> None:
    cluster = running(model_cluster, make_pool({"decode": {"replicas": 2}}))
    change_pods(cluster, "decode", routable=False, ready=False)
    decode = say(cluster)["decode"]
    assert (decode["ready"], decode["routable"], decode["summary"]) == (2, 0, "0/2")
    assert say(cluster)["ratio"] == "1:0"
