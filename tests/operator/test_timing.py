"""Times of a drain agree with each other whatever a user sets; budgets; and which group goes first."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from twinpool.core import protocol
from twinpool.core.protocol import RouterConfig, WorkerConfig
from twinpool.operator.logic.books import Entry, Report
from twinpool.operator.logic.disruption import disruption_budget, exposed
from twinpool.operator.logic.groups import Group
from twinpool.operator.logic.observed import Child, Observed, PodView
from twinpool.operator.logic.scale_in import Facts, choosing, facts, order
from twinpool.operator.logic.timing import drain_seconds
from twinpool.router.shell import control
from twinpool.worker.engines.command import SHUTDOWN_SECONDS
from twinpool.worker.logic.supervisor import KILL_SECONDS, STOP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]

DURATION = st.builds("{}{}".format, st.integers(1, 5000), st.sampled_from(["ms", "s", "m", "h"]))
OVERRIDE = {"spec": {"terminationGracePeriodSeconds": 1}}


def settings_of(template: Any, variable: str) -> str:
    for container in template["spec"]["containers"]:
        for entry in container.get("env", ()):
            if entry["name"] == variable:
                return str(entry["value"])
    raise AssertionError(variable)


@given(prefill=DURATION, decode=DURATION)
def test_no_time_of_a_drain_contradicts_another(make_pool: Make, model_cluster: Any, prefill: str, decode: str) -> None:
    roles = {
        name: {"drainTimeout": time, "podTemplate": OVERRIDE}
        for name, time in (("prefill", prefill), ("decode", decode))
    }
    cluster = model_cluster(make_pool(**roles, routing={"podTemplate": OVERRIDE}))
    cluster.reconcile()
    deployment = cluster.objects["Deployment", "demo-router"]["spec"]["template"]
    router_grace = deployment["spec"]["terminationGracePeriodSeconds"]
    router = RouterConfig.from_json(settings_of(deployment, protocol.ROUTER_CONFIG_ENV))
    for child in cluster.sets().values():
        template = child.content["spec"]["template"]
        grace = template["spec"]["terminationGracePeriodSeconds"]
        worker = WorkerConfig.from_json(settings_of(template, protocol.WORKER_CONFIG_ENV))
        ends = worker.drain_timeout + STOP_SECONDS + KILL_SECONDS
        assert ends < grace, "the launcher ends before the kubelet kills it"
        assert SHUTDOWN_SECONDS < STOP_SECONDS, "the engine ends before the launcher kills it"
        assert worker.drain_timeout <= drain_seconds(child) < worker.drain_timeout + 1, "both sides wait equally long"
        assert ends < router.drain_timeout, "routers outlive their workers"
        assert grace < router_grace
    assert router.drain_timeout + control._KILL_SECONDS < router_grace, "the router ends before the kubelet kills it"


def test_a_template_that_says_no_grace_period_has_the_kubelets() -> None:
    assert drain_seconds(Child("StatefulSet", "g", "u", "1", {})) == 15.0
    short = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 5}}}}
    assert drain_seconds(Child("StatefulSet", "g", "u", "1", short)) == 0.0


def test_a_budget_covers_every_rank_of_every_group_of_its_role(make_pool: Make) -> None:
    budget = disruption_budget(make_pool(), "decode")
    assert budget["metadata"]["name"] == "demo-decode"
    assert budget["spec"] == {
        "maxUnavailable": 1,
        "selector": {"matchLabels": {protocol.LABEL_POOL: "demo", protocol.LABEL_ROLE: "decode"}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


def test_a_role_that_goes_takes_its_budget_along(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool())
    cluster.settle()
    assert ("PodDisruptionBudget", "demo-prefill") in cluster.objects
    cluster.pool = make_pool(prefill=None)
    cluster.settle()
    assert ("PodDisruptionBudget", "demo-prefill") not in cluster.objects
    assert ("PodDisruptionBudget", "demo-decode") in cluster.objects


def test_roles_that_an_eviction_interrupts_are_named() -> None:
    assert exposed({"prefill": 2, "decode": 2}) == ""
    assert "decode has one group" in exposed({"prefill": 2, "decode": 1})
    assert "prefill and decode have one group" in exposed({"prefill": 1, "decode": 1})
    assert "set scaling.decode.min to 2" in exposed({"prefill": 2, "decode": 1}, scales=True)


def member(serial: int, *, ready: bool = True, node: str = "", revision: str = "new", retired: bool = False) -> Group:
    annotations = {"serving.twinpool.dev/retired": "true"} if retired else {}
    child = Child("StatefulSet", f"g{serial}", f"u{serial}", "1", {"metadata": {"annotations": annotations}})
    pod = PodView(f"g{serial}-0", "decode", child.name, revision, ready=ready, uid=f"p{serial}", node=node)
    return Group(child, "decode", revision, serial, (pod, dataclasses.replace(pod, uid="x", rank=1)))


def test_what_costs_least_goes_first() -> None:
    groups = [member(n) for n in range(1, 6)]
    groups[0] = member(1, ready=False)
    known = {
        "g1": Facts(work=9000),
        "g2": Facts(outdated=True, work=900),
        "g3": Facts(crowding=2, work=90),
        "g4": Facts(work=9),
    }
    assert [item.serial for item in order(groups, known)] == [1, 2, 3, 5, 4]


@given(st.permutations([member(n) for n in range(1, 7)]))
def test_between_equals_the_newest_goes_whatever_the_order_in_which_they_are_seen(groups: list[Group]) -> None:
    assert [item.serial for item in order(groups, {})] == [6, 5, 4, 3, 2, 1]


def test_facts_come_from_pods_and_from_the_routers_books(make_pool: Make) -> None:
    groups = [member(1, node="a"), member(2, node="a"), member(3, node="b", revision="old"), member(4, retired=True)]
    reports = {
        "r": Report({"p1": Entry(in_flight=1, tokens=10), "x": Entry(tokens=5000)}),
        "s": Report({"p1": Entry(unpulled=1), "p2": Entry(cached=70), "p3": Entry(in_flight=1)}),
        "t": None,
    }
    assert facts(Observed(make_pool(), reports=reports), groups, "new") == {
        "g1": Facts(crowding=1, work=12),
        "g2": Facts(crowding=1, work=70),
        "g3": Facts(outdated=True, work=1),
    }
    assert facts(Observed(make_pool()), groups, "new")["g1"].work == 0


def test_routers_are_asked_for_a_choice_between_equals_only(make_pool: Make) -> None:
    router = PodView("r", "router", phase="Running", ready=True, address="10.0.0.1")
    observed = Observed(make_pool(), (), (router,))
    two = [member(1), member(2)]
    assert choosing(observed, two, {"decode": 1})
    assert not choosing(observed, two, {"decode": 2})
    assert not choosing(observed, two, {"decode": 0}), "all go"
    assert not choosing(observed, [member(1), member(2, revision="old")], {"decode": 1})
    assert not choosing(observed, [member(1), member(2, retired=True)], {"decode": 1})
    assert not choosing(Observed(make_pool()), two, {"decode": 1}), "nobody could answer"
