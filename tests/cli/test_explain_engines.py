"""Two bottlenecks planted in pools of simulated engines, which run in virtual time: experts of which few are asked for,
and groups that still start. ``explain`` reads the pages that the engines write, as it reads those of a live pool.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from twinpool.cli.live.frame import Snapshot
from twinpool.cli.scrape import Scrape, parse
from twinpool.cli.slowness import observation
from twinpool.core.bottleneck import Finding, find
from twinpool.core.protocol import WorkerConfig
from twinpool.core.spec import InferencePool
from twinpool.operator.logic.observed import Observed, PodView
from twinpool.worker.engines.simulated.logic.engine import Engine, Limits
from twinpool.worker.engines.simulated.logic.experts import LAYERS, Balancing, Mixture
from twinpool.worker.engines.simulated.logic.metrics import render
from twinpool.worker.engines.simulated.logic.pace import Pace
from twinpool.worker.engines.simulated.logic.sequence import Order, Token
from twinpool.worker.logic import experts, report
from twinpool.worker.logic.supervisor import State

TTFT, ITL = 1.0, 0.04
#: GPUs of a group over which its experts are spread.
RANKS = 8
BOUNDS = [0.001 * 1.25**power for power in range(60)]
SPEC: dict[str, Any] = {
    "model": {"name": "m"},
    "engine": {"kind": "simulated"},
    "decode": {"parallelism": {"tensor": RANKS, "expert": True}, "expertBalancing": {}},
    "objectives": {"ttft": f"{TTFT * 1e3:.0f}ms", "itl": f"{ITL * 1e3:.0f}ms"},
}
CONFIG = WorkerConfig("m", "n", "aggregated", "r", "simulated", "m", "m", tensor=RANKS)


@dataclass
class Group:
    """A serving group: its engine, and from when on it serves."""

    engine: Engine
    serves_from: float = 0.0
    #: When the present step ends; None between steps.
    busy_until: float | None = None

    def go(self, now: float) -> None:
        """Begin the next step if there is something to do."""
        step, _ = self.engine.begin(now)
        self.busy_until = now + step.seconds if step else None


@dataclass
class Pool:
    """Groups behind a router that chooses the one with least in flight; it times first tokens and gaps."""

    groups: list[Group]
    now: float = 0.0
    asked: int = 0
    arrived: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def ask(self) -> None:
        """Take one request now."""
        self.asked += 1
        name = f"r{self.asked}"
        prompt = tuple(range(self.asked * 1000, self.asked * 1000 + 500))
        group = min((g for g in self.groups if g.serves_from <= self.now), key=lambda g: g.engine.unfinished)
        self.arrived[name] = self.now
        group.engine.submit(Order(name, prompt, 60, ignore_eos=True), self.now)
        if group.busy_until is None:
            group.go(self.now)

    def run(self, until: float, rate: float) -> Snapshot:
        """Let ``rate`` requests a second arrive until that moment, and look at the pool."""
        dice = random.Random(int(self.now) + 1)
        arrival = self.now + dice.expovariate(rate)
        while True:
            ending = min(self.groups, key=lambda group: group.busy_until or float("inf"))
            moment = min(arrival, ending.busy_until or float("inf"))
            if moment > until:
                break
            self.now = moment
            if moment == arrival:
                self.ask()
                arrival += dice.expovariate(rate)
            else:
                for event in ending.engine.end(moment):
                    assert isinstance(event, Token)
                    self.hear(event)
                ending.go(moment)
        self.now = until
        return self.look()

    def hear(self, token: Token) -> None:
        if token.index:
            self.gaps.append(self.now - self.last[token.id])
        else:
            self.first.append(self.now - self.arrived[token.id])
        self.last[token.id] = self.now

    def look(self) -> Snapshot:
        serving = [group.serves_from <= self.now for group in self.groups]
        role = {"desired": len(serving), "created": len(serving), "ready": sum(serving), "routable": sum(serving)}
        status = {"decode": {**role, "updated": len(serving), "summary": ""}}
        pool = InferencePool.model_validate(
            {"metadata": {"name": "m", "namespace": "n"}, "spec": SPEC, "status": status}
        )
        pods = tuple(
            PodView(f"d-{n}", "decode", f"d-{n}", "r", phase="Running", ready=ready) for n, ready in enumerate(serving)
        )
        engines = {f"d-{n}": self.page(group) for n, group in enumerate(self.groups) if serving[n]}
        return Snapshot(self.now, Observed(pool, (), pods), {"router": parse(self.router_page())}, engines)

    def page(self, group: Group) -> Scrape:
        """What engine and launcher of a group say."""
        balance = experts.read(CONFIG, group.engine.log, LAYERS)
        launcher = report.metrics(report.Snapshot(State(), "simulated", "m", "aggregated", "1", experts=balance))
        return parse(render([group.engine.metrics], "m") + launcher)

    def router_page(self) -> str:
        lines = [f"twinpool_router_first_event_seconds_sum {sum(self.first)}", "twinpool_router_queue_seconds_sum 0"]
        for name, seen in (("time_to_first_token", self.first), ("inter_token", self.gaps)):
            family = f"twinpool_router_{name}_seconds"
            lines += [f'{family}_bucket{{le="{bound}"}} {sum(x <= bound for x in seen)}' for bound in BOUNDS]
            lines += [f'{family}_bucket{{le="+Inf"}} {len(seen)}', f"{family}_count {len(seen)}"]
        lines += [
            f'twinpool_router_requests_in_flight{{worker="d-{n}"}} {group.engine.unfinished}'
            for n, group in enumerate(self.groups)
        ]
        return "\n".join(lines) + "\n"


def engine(skew: float, slots: int = 256) -> Engine:
    mixture = Mixture(RANKS, skew=skew, balancing=Balancing(interval=1_000_000, told_every=20))
    limits = Limits(kv_blocks=100_000, max_num_seqs=slots)
    return Engine(limits, Pace(token_seconds=0.02, prefill_rate=50_000), mixture=mixture)


def explained(pool: Pool, rate: float) -> Finding:
    before = pool.run(5.0, rate)
    return find(observation(before, pool.run(35.0, rate)))


@pytest.mark.parametrize(("skew", "planted"), [(0.9, True), (0.0, False)])
def test_experts_of_which_few_are_asked_for(skew: float, *, planted: bool) -> None:
    found = explained(Pool([Group(engine(skew)) for _ in range(2)]), rate=3.0)
    assert (found.cause == "expert skew") == planted
    assert found.within_objectives is not planted
    if planted:
        assert "of the busiest one's" in found.evidence[0]
        assert "more decode groups would help" in found.caution[0]


@pytest.mark.parametrize(("start", "planted"), [(300.0, True), (0.0, False)])
def test_groups_that_still_start(start: float, *, planted: bool) -> None:
    groups = [Group(engine(0.0, slots=8), serves_from=0.0 if n == 0 else start) for n in range(4)]
    found = explained(Pool(groups), rate=8.0)
    assert (found.cause == "cold start") == planted
    assert found.within_objectives is not planted
    if planted:
        assert found.evidence[0] == "3 of 4 decode groups do not serve yet"


def test_the_same_load_on_as_few_groups_as_were_wanted_is_a_queue() -> None:
    found = explained(Pool([Group(engine(0.0, slots=8))]), rate=8.0)
    assert (found.cause, found.within_objectives) == ("queue", False)
