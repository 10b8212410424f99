"""Into service and out of it: the gate that routers open, the drain that their books end, and who is asked when."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core import protocol
from twinpool.operator.logic import asking, names
from twinpool.operator.logic.actions import Annotate, Retire, ScaleToZero, SetGate
from twinpool.operator.logic.books import Entry, Report, read_report
from twinpool.operator.logic.drain import drains, retire, strays
from twinpool.operator.logic.gate import gates, pending
from twinpool.operator.logic.groups import Group, groups
from twinpool.operator.logic.observed import Child, Observed, PodView, timestamp
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]

NOW = 1_000_000.0
UNTIL = timestamp(NOW + 300.0)


def worker(rank: int = 0, **changes: Any) -> PodView:
    base = PodView(f"g-{rank}", "decode", "g", uid=f"u{rank}", rank=rank, phase="Running", gated=True, node="n1")
    return dataclasses.replace(base, **{"containers_ready": True, "address": "10.0.0.1", **changes})


def router(name: str = "r", **changes: Any) -> PodView:
    base = PodView(name, names.ROUTER, uid=name, phase="Running", ready=True, address="10.0.0.9")
    return dataclasses.replace(base, **changes)


def group(*pods: PodView, size: int = 1, replicas: int = 1, until: str | None = None, retired: bool = False) -> Group:
    annotations = {names.RETIRED_ANNOTATION: "true"} if retired or until else {}
    annotations |= {protocol.ANNOTATION_DRAINING: until} if until else {}
    template = {"spec": {"terminationGracePeriodSeconds": 315}}
    content = {"metadata": {"annotations": annotations, "labels": {}}, "spec": {"replicas": replicas}}
    content["spec"]["template"] = template  # type: ignore[assignment]
    child = Child("StatefulSet", "g", "ug", "7", content, pods=len(pods))
    return Group(child, "decode", "new", 1, pods, size)


@pytest.fixture
def seen(make_pool: Make) -> Callable[..., Observed]:
    """Observe routers and what they say of the pod ``u0``; ``replicas`` is how many routers the pool wants."""

    def build(*routers: PodView, replicas: int = 1, **entries: Entry | Report | None) -> Observed:
        def report(value: Entry | Report | None) -> Report | None:
            return Report({"u0": value}) if isinstance(value, Entry) else value

        reports = {name: report(value) for name, value in entries.items()} or None
        return Observed(make_pool(routing={"replicas": replicas}), (), routers, reports=reports)

    return build


ADMITTED, UNKNOWN = Entry(admitted=True), Entry()
IDLE = Entry(draining=True)


# The gate.


@pytest.mark.parametrize(
    ("routers", "entries", "opens", "words"),
    [
        ([router()], {"r": ADMITTED}, True, ""),
        ([router(), router("s")], {"r": ADMITTED, "s": ADMITTED}, True, ""),
        ([router(), router("s")], {"r": ADMITTED, "s": UNKNOWN}, False, "router pod s has not admitted g-0 yet"),
        ([router(), router("s")], {"r": ADMITTED, "s": None}, False, "s does not answer the operator at 10.0.0.9:8081"),
        ([router(), router("s")], {"r": ADMITTED}, False, "s does not answer"),
        ([router()], {"r": Report({"u0": ADMITTED}, current=False)}, False, "r does not answer"),
        ([router()], {}, False, "the routers are being asked"),
        ([router(), router("s", ready=False)], {"r": ADMITTED}, True, ""),
        ([router(), router("s", deadline=NOW)], {"r": ADMITTED}, True, ""),
        ([router(ready=False)], {"r": ADMITTED}, False, "no router pod is ready"),
        ([], {}, False, "no router pod is ready"),
    ],
)
def test_the_gate_opens_when_every_ready_router_lists_the_group(
    seen: Any, routers: list[PodView], entries: dict[str, Any], opens: bool, words: str
) -> None:
    observed, waiting = seen(*routers, **entries), group(worker())
    assert [(action.name, action.open) for action in gates(observed, [waiting])] == ([("g-0", True)] if opens else [])
    said = pending(observed, [waiting])
    assert words in said
    assert bool(said) == (not opens)


def test_a_pool_without_routers_waits_for_nobody_and_says_so(seen: Any) -> None:
    (action,) = gates(seen(replicas=0), [group(worker())])
    assert (action.open, action.reason) == (True, "NoRouters")
    assert "routing.replicas is 0" in action.message


def test_all_ranks_follow_their_leader(seen: Any) -> None:
    observed = seen(router(), r=ADMITTED)
    whole = group(worker(), worker(1), size=2)
    assert [action.name for action in gates(observed, [whole])] == ["g-0", "g-1"]
    again = group(worker(routable=True), worker(1), size=2)
    assert [action.name for action in gates(seen(router()), [again])] == ["g-1"], "no router is needed for that"
    assert pending(seen(router()), [again]) == ""


@pytest.mark.parametrize(
    ("pods", "size"),
    [
        ([worker(containers_ready=False)], 1),
        ([worker(deadline=NOW)], 1),
        ([worker(), worker(1, containers_ready=False)], 2),
        ([worker()], 2),
        ([worker(1)], 1),
        ([], 1),
    ],
)
def test_a_group_that_does_not_serve_gets_no_gate(seen: Any, pods: list[PodView], size: int) -> None:
    observed = seen(router(), r=ADMITTED)
    assert gates(observed, [group(*pods, size=size)]) == []


@pytest.mark.parametrize(
    ("pods", "reason", "words"),
    [
        ([worker(routable=True, containers_ready=False)], "GroupFailed", "containers of pod g-0 are not ready"),
        ([worker(routable=True), worker(1, routable=True, deadline=NOW)], "GroupFailed", "g-1 is being deleted"),
        ([worker(routable=True)], "GroupFailed", "1 of 2 pods do not exist"),
    ],
)
def test_a_failed_rank_closes_the_gates_that_are_open(seen: Any, pods: list[PodView], reason: str, words: str) -> None:
    (action,) = gates(seen(router(), r=ADMITTED), [group(*pods, size=2)])
    assert (action.name, action.open, action.reason) == ("g-0", False, reason)
    assert words in action.message


def test_a_drain_closes_the_gate(seen: Any) -> None:
    (action,) = gates(seen(router(), r=ADMITTED), [group(worker(routable=True), until=UNTIL)])
    assert (action.open, action.reason) == (False, "Draining")
    assert gates(seen(router(), r=ADMITTED), [group(worker(), until=UNTIL)]) == []


def test_pods_of_a_revision_without_the_gate_are_left_alone(seen: Any) -> None:
    assert gates(seen(router(), r=ADMITTED), [group(worker(gated=False))]) == []


ROUTER = st.builds(router, name=st.sampled_from("rst"), ready=st.booleans(), deadline=st.sampled_from([None, NOW]))
ENTRY = st.one_of(st.none(), st.builds(Entry, admitted=st.booleans(), draining=st.booleans()))


@given(routers=st.lists(ROUTER, max_size=3), entries=st.dictionaries(st.sampled_from("rst"), ENTRY))
def test_whatever_routers_do_and_say_an_open_gate_stays_open(
    make_pool: Make, routers: list[PodView], entries: dict[str, Entry | None]
) -> None:
    reports = {name: None if entry is None else Report({"u0": entry}) for name, entry in entries.items()}
    observed = Observed(make_pool(), (), tuple(routers), reports=reports)
    assert gates(observed, [group(worker(routable=True))]) == []


def roles_listed(make_pool: Make, model: Any, *, gated: bool) -> list[set[str]]:
    """Roll a pool out under routers that list a worker two minutes after it is up; return what they list each time."""

    class SlowRouters(model):  # type: ignore[misc, valid-type]
        up: dict[str, float]

        def run_controllers(self) -> None:
            super().run_controllers()
            if not gated:
                self.pods = {name: self._judged(replace(pod, gated=False)) for name, pod in self.pods.items()}

        def reports(self) -> Any:
            for pod in self.pods.values():
                if pod.containers_ready:
                    self.up.setdefault(pod.uid, self.now)
            known = {uid for uid, since in self.up.items() if self.now >= since + 120.0}
            return {
                name: Report({uid: replace(entry, admitted=entry.admitted and uid in known) for uid, entry in said})
                for name, said in ((name, report.entries.items()) for name, report in super().reports().items())
            }

    replace = dataclasses.replace
    cluster = SlowRouters(make_pool({"prefill": {"replicas": 2}, "decode": {"replicas": 2}}))
    cluster.up = {}
    cluster.settle()
    cluster.pool = make_pool({"prefill": {"replicas": 2}, "decode": {"replicas": 2}, "engine": {"args": ["--new"]}})
    seen = []
    for _ in range(200):
        cluster.reconcile()
        cluster.run_controllers()
        cluster.end_pods()
        cluster.set_ready()
        cluster.now += 5.0
        (said,) = cluster.reports().values()
        seen.append({pod.role for pod in cluster.pods.values() if pod.group and said.entries[pod.uid].admitted})
    assert {group.revision for group in groups(cluster.observed())} == {cluster.pool.status.revision}
    return seen


def test_a_rollout_leaves_no_moment_in_which_routers_list_nobody(make_pool: Make, model_cluster: Any) -> None:
    assert all(found == {"prefill", "decode"} for found in roles_listed(make_pool, model_cluster, gated=True))


def test_without_the_gate_there_is_such_a_moment(make_pool: Make, model_cluster: Any) -> None:
    assert set() in roles_listed(make_pool, model_cluster, gated=False)


# The drain.


def step(observed: Observed, leaving: Group, now: float = NOW) -> list[str]:
    return [
        action.result if isinstance(action, ScaleToZero) else type(action).__name__
        for action in drains(observed, [leaving], now)
    ]


MARKED = worker(draining=True)


def test_a_drain_is_marked_first_with_the_time_that_its_own_template_gives(seen: Any) -> None:
    mark = retire(group(worker()), NOW)
    assert mark == Retire("g", "ug", "7", UNTIL)
    assert step(seen(router()), group(worker(), retired=True)) == ["Retire"], "a mark without a time gets one"


def test_every_rank_is_marked_before_anybody_is_believed(seen: Any) -> None:
    observed = seen(router(), r=IDLE)
    leaving = group(worker(draining=True), worker(1), worker(2, deadline=NOW), size=3, until=UNTIL)
    assert drains(observed, [leaving], NOW) == [Annotate("Pod", "g-1", "u1", protocol.ANNOTATION_DRAINING, UNTIL)]


@pytest.mark.parametrize(
    ("routers", "entries", "result"),
    [
        ([router()], {"r": IDLE}, ["drained"]),
        ([router()], {"r": Entry(draining=True, in_flight=1)}, []),
        ([router()], {"r": Entry(draining=True, unpulled=1)}, []),
        ([router()], {"r": Entry(admitted=True)}, []),
        ([router()], {"r": UNKNOWN}, []),
        ([router()], {"r": None}, []),
        ([router()], {"r": Report({"u0": IDLE}, current=False)}, []),
        ([router()], {}, []),
        ([router(), router("s")], {"r": IDLE, "s": Entry(draining=True, in_flight=1)}, []),
        ([router(), router("s", deadline=NOW)], {"r": IDLE, "s": Entry(draining=True, in_flight=1)}, []),
        ([router(), router("s", deadline=NOW)], {"r": IDLE, "s": None}, ["drained"]),
        ([router(), router("s", ready=False)], {"r": IDLE}, ["drained"]),
        ([router(phase="Pending")], {}, ["drained"]),
        ([], {}, ["drained"]),
    ],
)
def test_a_drain_ends_when_no_router_owes_the_group_anything(
    seen: Any, routers: list[PodView], entries: dict[str, Any], result: list[str]
) -> None:
    assert step(seen(*routers, **entries), group(MARKED, until=UNTIL)) == result


def test_a_drain_ends_at_its_deadline_whatever_is_in_flight(seen: Any) -> None:
    busy = seen(router(), r=Entry(draining=True, in_flight=1))
    assert step(busy, group(MARKED, until=UNTIL), NOW + 299) == []
    assert step(busy, group(MARKED, until=UNTIL), NOW + 300) == ["deadline"]


@pytest.mark.parametrize("pods", [[], [worker(1)], [worker(containers_ready=False)], [worker(deadline=NOW)]])
def test_a_group_that_does_not_serve_is_not_waited_for(seen: Any, pods: list[PodView]) -> None:
    assert step(seen(router(), r=Entry(in_flight=1)), group(*pods, until=UNTIL)) == ["not_serving"]


def test_a_group_at_zero_or_in_service_is_not_drained(seen: Any) -> None:
    assert step(seen(router()), group(MARKED, until=UNTIL, replicas=0)) == []
    assert step(seen(router()), group(worker())) == []


def test_a_mark_on_a_pod_whose_group_stays_is_taken_off() -> None:
    assert strays([group(MARKED)]) == [Annotate("Pod", "g-0", "u0", protocol.ANNOTATION_DRAINING, None)]
    assert strays([group(MARKED, until=UNTIL), group(worker(draining=True, deadline=NOW)), group(worker())]) == []


def test_a_busy_group_keeps_its_pods_until_its_requests_have_ended(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool({"decode": {"replicas": 2}}))
    cluster.settle()
    cluster.busy = 1
    cluster.pool = make_pool()
    for _ in range(5):
        cluster.reconcile()
        cluster.run_controllers()
    assert [pod for pod in cluster.pods.values() if pod.deadline is not None] == []
    left = plan(cluster.observed(), Settings(), cluster.now).requeue_after
    assert left == 301.0, "nothing but the clock tells when the deadline comes"
    cluster.busy = 0
    cluster.settle()
    assert len(cluster.sets()) == 2


def test_an_operator_that_dies_at_any_step_of_a_drain_is_carried_on(make_pool: Make, model_cluster: Any) -> None:
    for dies in range(6):
        cluster = model_cluster(make_pool({"decode": {"replicas": 2}}))
        cluster.settle()
        cluster.pool = make_pool()
        for count in range(4):
            cluster.reconcile(upto=dies if count == dies % 3 else None)
        cluster.settle()
        assert len(cluster.sets()) == 2


# Who is asked when.


def test_an_idle_pool_asks_nobody(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool({"decode": {"replicas": 2}}))
    cluster.settle()
    assert asking.to_ask(cluster.observed()) == []
    cluster.pool = make_pool()
    assert [pod.role for pod in asking.to_ask(cluster.observed())] == [names.ROUTER], "a group must be chosen"
    assert asking.hold(dataclasses.replace(cluster.observed(), reports=None))
    assert not asking.hold(cluster.observed())
    cluster.reconcile()
    assert asking.to_ask(cluster.observed()), "a group drains"
    cluster.settle()
    assert asking.to_ask(cluster.observed()) == []


def test_a_pod_that_waits_for_its_gate_has_the_routers_asked(make_pool: Make, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool())
    for _ in range(2):
        cluster.reconcile()
        cluster.run_controllers()
    assert asking.to_ask(cluster.observed()) == [], "nothing is up yet"
    cluster.set_ready()
    assert len(asking.to_ask(cluster.observed())) == 1
    assert {type(action) for action in cluster.planned()} == {SetGate}


# What routers answer.


def test_an_answer_is_read_by_the_uid_of_the_leader() -> None:
    entry = {
        "uid": "u",
        "admitted": True,
        "draining": False,
        "inFlight": 2,
        "tokensInFlight": 30,
        "unpulledHandoffs": 1,
        "cachedTokensUsed": 7,
    }
    answer = {"synced": True, "current": True, "endpoints": [entry, {"uid": ""}, "x", {"uid": "v", "inFlight": "x"}]}
    assert read_report(answer) == Report({"u": Entry(True, False, 2, 30, 1, 7), "v": Entry()})


@pytest.mark.parametrize("answer", [None, [], {}, {"endpoints": {}}])
def test_anything_else_is_no_answer(answer: Any) -> None:
    assert read_report(answer) is None


def test_an_answer_without_its_own_word_for_it_is_not_current() -> None:
    report = read_report({"endpoints": [], "synced": True})
    assert report is not None
    assert not report.current


def test_the_gist_changes_with_decisions_and_not_with_numbers() -> None:
    busy, busier = (Report({"u": Entry(draining=True, in_flight=n)}) for n in (1, 2))
    assert busy.gist() == busier.gist()
    assert busy.gist() != Report({"u": IDLE}).gist()
