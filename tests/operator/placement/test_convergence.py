"""Gate, hand over, bind, take back: with a model of kube-scheduler, and with somebody who takes nodes in between."""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.placement.cases import GPU, node
from twinpool.cli.placement import Seen, foreseen
from twinpool.core.topology import PRESETS, topology
from twinpool.operator.logic import names
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.observed import Observed
from twinpool.operator.logic.pinning import claimed, shortages
from twinpool.operator.logic.placement.ledger import Claim, Promise, decide
from twinpool.operator.logic.placement.model import Holder, Node
from twinpool.operator.logic.placement.reading import Held
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

TOPOLOGY = topology(PRESETS["topograph"])
SEES = Settings(topology=TOPOLOGY, sees_nodes=True)


class World:
    """A pool on a few nodes of two GPUs, a scheduler that binds what fits, and somebody else with pods of one GPU."""

    def __init__(self, cluster: Any, random: Random) -> None:
        self.cluster, self.random = cluster, random
        count = random.randint(2, 8)
        self.nodes = [node(f"n{n}", f"b{n // 4}", f"r{n // 2}", f"c{n // 2}", 2) for n in range(count)]
        self.others: list[str] = []
        self.promises: dict[str, Promise] = {}
        self.refused = 0
        self.short: list[str] = []

    def used(self) -> Counter[str]:
        """Return the GPUs taken on each node: two by each bound pod of ours."""
        used = Counter(self.others)
        for pod in self.cluster.pods.values():
            if pod.group and pod.node:
                used[pod.node] += 2
        return used

    def held(self) -> list[Held]:
        found = [Held(name, f"other-{n}", Holder(f"x/{n}", {GPU: 1})) for n, name in enumerate(self.others)]
        return found + [
            Held(pod.node or pod.pinned, pod.uid, Holder(pod.name, {GPU: 2, "pods": 1}))
            for pod in self.cluster.pods.values()
            if pod.group and (pod.node or pod.pinned)
        ]

    def step(self, steals: bool) -> None:
        """Decide, plan and carry out; somebody else may be faster than kube-scheduler."""
        observed = self.cluster.observed()
        claims = [Claim(observed.pool, group) for group in claimed(groups(observed))]
        ledger = decide(claims, self.promises, self.nodes, self.held(), TOPOLOGY)
        self.promises = dict(ledger.promises)
        verdicts = {name.partition("/")[2]: verdict for name, verdict in ledger.verdicts.items()}
        observed = dataclasses.replace(observed, verdicts=verdicts)
        self.short = [found.gang.partition("/")[2] for found in shortages(observed, groups(observed))]
        for action in plan(observed, SEES, self.cluster.now).actions:
            self.cluster.carry_out(action)
        self.cluster.run_controllers()
        if steals and self.random.random() < 0.7:
            free = [item.name for item in self.nodes if self.used()[item.name] < 2]
            self.others += self.random.sample(free, min(1, len(free)))
        self._schedule()
        self.cluster.end_pods()
        self.cluster.now += 5.0

    def _schedule(self) -> None:
        for name, pod in self.cluster.pods.items():
            if pod.group and not pod.scheduling_gates and not pod.node and pod.deadline is None:
                fits = pod.pinned and self.used()[pod.pinned] == 0
                bound = {"node": pod.pinned, "scheduled": True, "unschedulable": False}
                self.refused += not fits
                changes = bound if fits else {"scheduled": False, "unschedulable": True}
                self.cluster.pods[name] = dataclasses.replace(pod, **changes)

    def bound(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for pod in sorted(self.cluster.pods.values(), key=lambda pod: pod.rank):
            if pod.group:
                found.setdefault(pod.group, []).append(pod.node)
        return found


@pytest.fixture(scope="module")
def world(make_pool: Callable[..., InferencePool], model_cluster: Any) -> Callable[[Random], World]:
    def build(random: Random) -> World:
        limits = {"spec": {"containers": [{"name": "engine", "resources": {"limits": {GPU: "2"}}}]}}
        wide = random.random() < 0.7
        role = {
            "parallelism": {"tensor": 4 if wide else 2},
            "resources": {"gpu": {"perNode": 2}},
            "podTemplate": limits,
        }
        pool = make_pool(prefill=None, decode={**role, "replicas": random.randint(1, 3)}, placement={})
        return World(model_cluster(pool), random)

    return build


def clique(nodes: list[Node], name: str) -> str:
    return next(item.labels["nvidia.com/gpu.clique"] for item in nodes if item.name == name)


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_without_competition_everything_lands_where_it_was_foretold(
    world: Callable[[Random], World], seed: int
) -> None:
    made = world(Random(seed))
    layout = foreseen(Observed(made.cluster.pool), Seen(made.nodes, []), TOPOLOGY)
    for _ in range(6):
        made.step(steals=False)
    assert {name: nodes for name, nodes in made.bound().items() if all(nodes)} == {
        name.partition("/")[2]: list(nodes) for name, nodes in layout.places.items()
    }
    vain = {name.partition("/")[2] for name, short in layout.short.items() if short.in_vain}
    assert {name for name in made.short if name not in vain} == {
        name.partition("/")[2] for name in layout.short if name.partition("/")[2] not in vain
    }
    assert made.refused == 0 or vain, "kube-scheduler is asked for nothing that it refuses"


@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_with_competition_it_ends_in_whole_groups_or_in_a_stated_shortage(
    world: Callable[[Random], World], seed: int
) -> None:
    made = world(Random(seed))
    for _ in range(8):
        made.step(steals=True)
    for _ in range(30):
        made.step(steals=False)
    used = made.used()
    assert all(used[item.name] <= 2 for item in made.nodes), "nothing is given twice"
    for name, nodes in made.bound().items():
        if all(nodes):
            assert len({clique(made.nodes, where) for where in nodes}) == 1, "hard rules hold"
        else:
            assert not any(nodes), "no half of a group keeps its nodes"
            pods = [pod for pod in made.cluster.pods.values() if pod.group == name]
            assert name in made.short or all(pod.unschedulable for pod in pods), "it says what is short"


@pytest.mark.parametrize("eager", [False, True], ids=["operator first", "kube-scheduler first"])
def test_a_group_that_only_new_nodes_can_hold_is_shown_and_lands_whole_when_they_come(
    make_pool: Callable[..., InferencePool], model_cluster: Any, eager: bool
) -> None:
    limits = {"spec": {"containers": [{"name": "engine", "resources": {"limits": {GPU: "2"}}}]}}
    role = {"parallelism": {"tensor": 4}, "resources": {"gpu": {"perNode": 2}}, "podTemplate": limits}
    made = World(model_cluster(make_pool(prefill=None, decode=role, placement={})), Random(1))
    made.nodes = [node(f"n{n}", "b", f"r{n}", f"c{n}", 2) for n in range(2)]
    for _ in range(4):
        made.step(steals=False)
    (child,) = made.cluster.sets().values()
    spec = child.content["spec"]["template"]["spec"]
    pods = [pod for pod in made.cluster.pods.values() if pod.group]
    assert child.annotation(names.GROWTH_ANNOTATION) == "nvidia.com/gpu.clique n0 n1"
    assert "podAffinity" in spec["affinity"]
    assert "schedulingGates" not in spec
    assert len(pods) == 2
    assert all(pod.unschedulable and not pod.scheduling_gates for pod in pods), "an autoscaler sees them"
    uids = {pod.uid for pod in pods}
    made.step(steals=False)
    assert {pod.uid for pod in made.cluster.pods.values() if pod.group} == uids, "and nothing is made anew for nothing"
    made.nodes += [node(name, "b", "r9", "c9", 2) for name in ("n8", "n9")]
    if eager:
        first = next(name for name, pod in made.cluster.pods.items() if pod.group)
        bound = {"node": "n9", "scheduled": True, "unschedulable": False}
        made.cluster.pods[first] = dataclasses.replace(made.cluster.pods[first], **bound)
    for _ in range(5):
        made.step(steals=False)
    (places,) = made.bound().values()
    assert sorted(places) == ["n8", "n9"]
    (child,) = made.cluster.sets().values()
    assert child.annotation(names.GROWTH_ANNOTATION) is None
    assert child.content["spec"]["template"]["spec"]["schedulingGates"]
