"""Whatever happens, and whenever the operator dies, plans lead to exactly the wanted groups and then to nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Apply, Retire
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

ROLE = st.sampled_from(["prefill", "decode"])


class Scenario(RuleBasedStateMachine):
    """A pool, its users, its nodes and an operator that dies at any moment."""

    make_pool: Callable[..., InferencePool]
    new_cluster: Callable[[InferencePool], Any]

    def __init__(self) -> None:
        super().__init__()
        self.spec: dict[str, Any] = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}
        self.cluster = type(self).new_cluster(type(self).make_pool(self.spec))
        self.held: set[str] = set()

    def _edit(self, change: dict[str, Any]) -> None:
        before = self.cluster.pool
        self.spec = {**self.spec, **change}
        edited = (
            type(self).make_pool(self.spec) if self.spec["prefill"] else type(self).make_pool(self.spec, prefill=None)
        )
        metadata = edited.metadata.model_copy(update={"generation": before.metadata.generation + 1})
        self.cluster.pool = edited.model_copy(update={"status": before.status, "metadata": metadata})

    @rule(role=ROLE, count=st.integers(0, 4))
    def scale(self, role: str, count: int) -> None:
        if self.spec[role]:
            self._edit({role: {**self.spec[role], "replicas": count}})

    @rule(argument=st.sampled_from(["--a", "--b", "--c"]))
    def new_revision(self, argument: str) -> None:
        self._edit({"engine": {"args": [argument]}})

    @rule(there=st.booleans())
    def aggregate(self, there: bool) -> None:
        self._edit({"prefill": {"replicas": 1} if there else None})

    @rule()
    def reconcile(self) -> None:
        self._checked(None)

    @rule(upto=st.integers(0, 6))
    def operator_dies(self, upto: int) -> None:
        self._checked(upto)

    def _checked(self, upto: int | None) -> None:
        """Reconcile after checking that the plan gives up nothing that still serves."""
        observed = self.cluster.observed()
        made = plan(observed, Settings(), self.cluster.now)
        assert made == plan(observed, Settings(), self.cluster.now)
        wanted = {name: role.replicas for name, role in names.roles(self.cluster.pool).items()}
        existing = {group.name: group for group in groups(observed)}
        leaving = {action.name for action in made.actions if isinstance(action, Retire)}
        for role, count in wanted.items():
            ready = {name for name, group in existing.items() if group.role == role and group.ready}
            assert len(ready - leaving) >= min(count, len(ready)), "a serving group went before its replacement served"
        self._check_surge(made.actions, existing, wanted)
        self.cluster.reconcile(upto=upto)

    def _check_surge(self, actions: Any, existing: dict[str, Any], wanted: dict[str, int]) -> None:
        sets = [a for a in actions if isinstance(a, Apply) and a.kind == "StatefulSet" and a.name not in existing]
        made = Counter(action.body["metadata"]["labels"][protocol.LABEL_ROLE] for action in sets)
        for role, count in made.items():
            there = [group for group in existing.values() if group.role == role and not group.retired]
            assert len(there) + count <= wanted[role] + 1

    @rule()
    def controllers(self) -> None:
        self.cluster.run_controllers()

    @rule(seconds=st.sampled_from([1.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.now += seconds
        self.cluster.end_pods(frozenset(self.held))

    @rule(ready=st.booleans(), role=st.sampled_from(["prefill", "decode", "router"]))
    def pods_change(self, ready: bool, role: str) -> None:
        self.cluster.set_ready(ready, lambda pod: pod.role == role)

    @precondition(lambda self: self.cluster.pods)
    @rule(data=st.data())
    def node_is_lost(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.cluster.pods)))
        pod = self.cluster.pods[name]
        self.held.add(name)
        self.cluster.pods[name] = dataclasses.replace(pod, ready=False, deadline=self.cluster.now)

    @rule()
    def nodes_come_back(self) -> None:
        self.held.clear()

    @precondition(lambda self: self.cluster.objects)
    @rule(data=st.data())
    def child_is_deleted(self, data: st.DataObject) -> None:
        # The router's Service remembers the last serial; a group is remembered once it was seen.
        service = self.cluster.objects.get(("Service", "demo-router"))
        last = int(service["metadata"]["annotations"][names.LAST_SERIAL_ANNOTATION]) if service else 0
        free = [
            key
            for key, body in self.cluster.objects.items()
            if key != ("Service", "demo-router")
            and int(body["metadata"].get("annotations", {}).get(names.SERIAL_ANNOTATION, 0)) <= last
        ]
        if free:
            del self.cluster.objects[data.draw(st.sampled_from(sorted(free)))]

    @precondition(lambda self: self.cluster.objects)
    @rule(data=st.data())
    def child_is_edited(self, data: st.DataObject) -> None:
        body = self.cluster.objects[data.draw(st.sampled_from(sorted(self.cluster.objects)))]
        if names.RETIRED_ANNOTATION in body["metadata"]["annotations"]:
            return
        if "replicas" in body.get("spec", {}):
            body["spec"]["replicas"] += 1
        body["metadata"]["labels"][protocol.LABEL_MANAGED_BY] = "somebody"
        body["metadata"]["resourceVersion"] = self.cluster.version()

    @invariant()
    def one_owner(self) -> None:
        for body in self.cluster.objects.values():
            owners = [owner for owner in body["metadata"]["ownerReferences"] if owner.get("controller")]
            assert [owner["uid"] for owner in owners] == ["uid-pool"]

    def teardown(self) -> None:
        self.held.clear()
        self.cluster.settle()
        pool = self.cluster.pool
        observed = self.cluster.observed()
        wanted = {name: role.replicas for name, role in names.roles(pool).items() if role.replicas}
        existing = groups(observed)
        assert Counter(group.role for group in existing) == wanted
        assert {group.revision for group in existing} <= {pool.status.revision}
        assert all(child.label(protocol.LABEL_MANAGED_BY) == protocol.MANAGED_BY for child in observed.children)
        services = {child.name for child in observed.children if child.kind == "Service"}
        assert services == {"demo-router", *(f"demo-{role}" for role in names.roles(pool))}
        again = plan(observed, Settings(), self.cluster.now + 1000)
        assert not again.actions
        assert again.status == pool.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        ready = {item.type: item.status for item in pool.status.conditions}["Ready"]
        assert ready == ("True" if wanted.get("decode") else "False")


def test_every_history_ends_with_the_wanted_groups(
    make_pool: Callable[..., InferencePool], model_cluster: Callable[[InferencePool], Any]
) -> None:
    # staticmethod: the machine is built anew for every example and must not get the functions bound to it.
    scenario = type(
        "Bound", (Scenario,), {"make_pool": staticmethod(make_pool), "new_cluster": staticmethod(model_cluster)}
    )
    run_state_machine_as_test(
        scenario,
        settings=settings(
            max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )
