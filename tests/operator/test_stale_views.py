"""Plans from views that are late, kind by kind, or that lost events: nothing is duplicated, and it ends well."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Action, Apply, Delete, Retire, ScaleToZero
from twinpool.operator.logic.books import Report
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.observed import Observed, read_child
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings
from twinpool.operator.shell.observe import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

ROLE = st.sampled_from(["prefill", "decode"])
KEY = ("team", "demo")


class LateViews:
    """The API server with watches that are late, and with the preconditions of writes; the model is its base.

    ``view`` is what the watches have shown; ``memory`` is what the operator's process remembers.
    """

    def __init__(self, pool: InferencePool) -> None:
        super().__init__(pool)
        self.view: dict[str, list[Any]] = {}
        self.seen_pool = pool
        self.seen_pods: tuple[Any, ...] = ()
        self.memory = Memory()
        self.conflicts = 0
        #: Requests in flight by group; a moment later they may be elsewhere.
        self.work: dict[str, int] = {}

    def deliver(self, kind: str) -> None:
        """Let the watch of one kind catch up."""
        if kind == "pool":
            self.seen_pool = self.pool
        elif kind == "Pod":
            self.seen_pods = tuple(self.pods.values())
        else:
            self.view[kind] = [
                read_child(kind, copy.deepcopy(body)) for (found, _), body in self.objects.items() if found == kind
            ]

    def deliver_all(self) -> None:
        for kind in ("pool", "Pod", *self.view, *(kind for kind, _ in self.objects)):
            self.deliver(kind)

    def observed(self) -> Observed:
        children = tuple(self.memory.newest(KEY, (child for found in self.view.values() for child in found)))
        self.memory.noticed(KEY, children)
        serial = self.memory.last_serial(KEY)
        return Observed(self.seen_pool, children, self.seen_pods, last_serial=serial, reports=self.reports())

    def reports(self) -> Any:
        groups_of = {pod.uid: pod.group for pod in self.pods.values()}
        return {
            router: Report(
                {
                    uid: dataclasses.replace(entry, in_flight=self.work.get(groups_of[uid], 0))
                    for uid, entry in report.entries.items()
                }
            )
            for router, report in super().reports().items()
        }

    def live(self) -> set[str]:
        """Return the groups that are meant to stay, as the API server knows them."""
        return {
            name
            for (kind, name), body in self.objects.items()
            if kind == "StatefulSet" and names.RETIRED_ANNOTATION not in body["metadata"]["annotations"]
        }

    def carry_out(self, action: Action) -> None:
        stored = self.objects.get((action.kind, action.name))
        metadata = stored["metadata"] if stored else {}
        exact = (metadata.get("uid"), metadata.get("resourceVersion"))
        match action:
            case Apply(body, "", _):
                # The shell looks before it makes anything: the watch may not show it yet.
                super().carry_out(Apply(body, metadata.get("uid", "")))
            case Apply(body, uid, version) if exact == (uid, version):
                super().carry_out(Apply(body, uid))
            case Retire(_, uid, version) | ScaleToZero(_, uid, version) | Delete(_, _, uid, version) if exact == (
                uid,
                version,
            ):
                super().carry_out(action)
                if not isinstance(action, Delete):
                    body = copy.deepcopy(self.objects[action.kind, action.name])
                    self.memory.wrote(KEY, read_child(action.kind, body))
            case Apply() | Retire() | ScaleToZero() | Delete():
                self.conflicts += 1
            case _:
                self._other(action)

    def _other(self, action: Any) -> None:
        pod = self.pods.get(action.name)
        if pod is None or pod.uid != action.uid:
            self.conflicts += 1
        else:
            super().carry_out(action)

    def _report(self) -> None:
        before = {key: copy.deepcopy(body.get("status")) for key, body in self.objects.items()}
        super()._report()
        for key, body in self.objects.items():
            if body.get("status") != before[key]:
                body["metadata"]["resourceVersion"] = self.version()


class Lateness(RuleBasedStateMachine):
    """A pool whose operator sees everything late and dies at any moment."""

    make_pool: Callable[..., InferencePool]
    new_cluster: Callable[[InferencePool], Any]

    def __init__(self) -> None:
        super().__init__()
        self.spec: dict[str, Any] = {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}
        self.cluster = type(self).new_cluster(type(self).make_pool(self.spec))

    def _edit(self, change: dict[str, Any]) -> None:
        before = self.cluster.pool
        self.spec = {**self.spec, **change}
        edited = type(self).make_pool(self.spec)
        metadata = edited.metadata.model_copy(update={"generation": before.metadata.generation + 1})
        self.cluster.pool = edited.model_copy(update={"status": before.status, "metadata": metadata})

    @rule(role=ROLE, count=st.integers(0, 3))
    def scale(self, role: str, count: int) -> None:
        self._edit({role: {**self.spec[role], "replicas": count}})

    @rule(argument=st.sampled_from(["--a", "--b"]))
    def new_revision(self, argument: str) -> None:
        self._edit({"engine": {"args": [argument]}})

    @rule(kind=st.sampled_from(["pool", "Pod", "StatefulSet", "Service", "Deployment", "Role", "ServiceAccount"]))
    def a_watch_catches_up(self, kind: str) -> None:
        self.cluster.deliver(kind)

    @rule()
    def every_watch_catches_up(self) -> None:
        self.cluster.deliver_all()

    @rule()
    def reconcile(self) -> None:
        self.cluster.reconcile()

    @rule(work=st.lists(st.integers(0, 9), max_size=6))
    def plan_twice_before_any_watch_shows_what_was_done(self, work: list[int]) -> None:
        self.cluster.reconcile()
        made = list(self.cluster.created_groups)
        self.cluster.work = dict(zip(sorted(self.cluster.live()), work, strict=False))
        self.cluster.reconcile()
        assert self.cluster.created_groups == made, "a plan from an old view made a group again"

    @rule(upto=st.integers(0, 6))
    def operator_dies_and_starts(self, upto: int) -> None:
        """A new process lists everything before it plans anything, and remembers nothing."""
        self.cluster.reconcile(upto=upto)
        self.cluster.memory = Memory()
        self.cluster.deliver_all()

    @rule()
    def controllers(self) -> None:
        self.cluster.run_controllers()

    @rule(seconds=st.sampled_from([1.0, 60.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.now += seconds
        self.cluster.end_pods()

    @rule(ready=st.booleans(), role=ROLE)
    def pods_change(self, ready: bool, role: str) -> None:
        self.cluster.set_ready(ready, lambda pod: pod.role == role)

    @precondition(lambda self: self.cluster.objects)
    @rule(data=st.data())
    def child_is_deleted(self, data: st.DataObject) -> None:
        # The router's Service remembers the last serial; a group that it knows may be deleted by anybody.
        service = self.cluster.objects.get(("Service", "demo-router"))
        last = int(service["metadata"]["annotations"][names.LAST_SERIAL_ANNOTATION]) if service else 0
        serial = lambda body: int(body["metadata"].get("annotations", {}).get(names.SERIAL_ANNOTATION, 0))  # noqa: E731
        free = [key for key, body in self.cluster.objects.items() if serial(body) <= last]
        free = sorted(key for key in free if key != ("Service", "demo-router"))
        if free:
            del self.cluster.objects[data.draw(st.sampled_from(free))]

    @invariant()
    def every_object_has_one_owner(self) -> None:
        for body in self.cluster.objects.values():
            owners = [owner for owner in body["metadata"]["ownerReferences"] if owner.get("controller")]
            assert [owner["uid"] for owner in owners] == ["uid-pool"]

    @invariant()
    def no_serial_is_given_twice(self) -> None:
        sets = [body["metadata"] for (kind, _), body in self.cluster.objects.items() if kind == "StatefulSet"]
        assert len({item["annotations"][names.SERIAL_ANNOTATION] for item in sets}) == len(sets)

    def teardown(self) -> None:
        """Whatever was seen late: once the views catch up, the pool comes to rest as it should be."""
        self.cluster.deliver_all()
        quiet = 0
        for _ in range(80):
            quiet = 0 if self.cluster.reconcile() else quiet + 1
            self.cluster.deliver_all()
            if quiet > 3:
                break
            self.cluster.run_controllers()
            self.cluster.end_pods()
            self.cluster.set_ready()
            self.cluster.deliver_all()
            self.cluster.now += 60.0
        pool, observed = self.cluster.pool, self.cluster.observed()
        wanted = {name: role.replicas for name, role in names.roles(pool).items() if role.replicas}
        assert Counter(group.role for group in groups(observed)) == wanted
        assert not plan(observed, Settings(), self.cluster.now).actions
        assert all(child.label(protocol.LABEL_POOL) == "demo" for child in observed.children)


def test_views_that_are_late_duplicate_nothing_and_end_in_the_wanted_groups(
    make_pool: Callable[..., InferencePool], model_cluster: type[Any]
) -> None:
    made = type("Late", (LateViews, model_cluster), {})
    scenario = type("Bound", (Lateness,), {"make_pool": staticmethod(make_pool), "new_cluster": staticmethod(made)})
    checks = [HealthCheck.too_slow]
    run_state_machine_as_test(
        scenario,
        settings=settings(max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=checks),
    )


def test_work_that_moves_between_two_plans_takes_no_further_group(
    make_pool: Callable[..., InferencePool], model_cluster: type[Any]
) -> None:
    """Which group goes depends on work in flight; the second plan must know what the first one marked."""
    cluster = type("Late", (LateViews, model_cluster), {})(make_pool({"decode": {"replicas": 3}}))
    for _ in range(20):
        cluster.reconcile()
        cluster.run_controllers()
        cluster.set_ready()
        cluster.deliver_all()
    decode = [name for name in sorted(cluster.live()) if "decode" in name]
    cluster.pool = make_pool({"decode": {"replicas": 1}})
    cluster.deliver("pool")
    for busy in decode:
        cluster.work = {busy: 5}
        cluster.reconcile()
    assert len(cluster.live() & set(decode)) == 1


def test_a_name_is_not_used_again_when_only_the_watch_that_remembers_it_is_late(
    make_pool: Callable[..., InferencePool], model_cluster: type[Any]
) -> None:
    cluster = type("Late", (LateViews, model_cluster), {})(make_pool({"prefill": {"replicas": 0}}))
    cluster.reconcile()
    cluster.deliver_all()  # the Service says that no group was made yet
    (group,) = cluster.created_groups
    cluster.observed()
    del cluster.objects["StatefulSet", group]
    cluster.deliver("StatefulSet")
    cluster.reconcile()  # the model refuses a name that was used before
    assert len(cluster.created_groups) == 2
