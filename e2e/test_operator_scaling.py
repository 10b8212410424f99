"""Numbers of groups follow the arriving work: the ratio at constant request rate, the GPU budget, zero and back."""

from __future__ import annotations

import itertools
import math
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.client import post, stream
from twinpool.demo.scenario import condition, pool, router_url
from twinpool.localcluster.waiting import WaitTimeout, wait_until
from twinpool.operator.logic.autoscaler import TICK

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.localcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

#: When a change was decided, and the prefill and decode groups before and after it.
Decision = tuple[str, tuple[int, int], tuple[int, int]]

NAME, MODEL = "elastic", "simulated-model"
#: What users are promised, in seconds, and the share of them.
TTFT, ITL, SHARE = 6.0, 0.2, 0.9
#: GPUs (on the CPU: ranks) that all groups together may hold.
BUDGET = 5
#: Requests per second, the same all the time.
RATE = 2.0
#: Ten times as slow as the modelled H100: what the operator must find out by itself.
ARGS = ["--time-scale=10", "--max-num-seqs=4"]
#: A prompt takes a tenth of a second or half of one, an answer 3 tokens or 32 of a tenth of a second. Long prompts keep
#: one prefill group and a bit busy: two are enough on a machine that is busy itself, and the budget has two more.
READING = {"prompt": "long " * 1200, "max_tokens": 3}
WRITING = {"prompt": "short " * 100, "max_tokens": 32}


def manifest(low: int = 1, window: str = "6s", patience: str = "6s") -> str:
    role = {"resources": {"gpu": {"perNode": 0}}, "drainTimeout": "10s", "replicas": 1}
    bounds = {"prefill": {"min": low, "max": 4}, "decode": {"min": low, "max": 4}, "gpuBudget": BUDGET}
    spec = {
        "model": {"name": MODEL},
        "engine": {"kind": "simulated", "args": ARGS},
        "prefill": role,
        "decode": role,
        "objectives": {"ttft": f"{TTFT:g}s", "itl": f"{1000 * ITL:g}ms", "percentile": round(100 * SHARE)},
        "scaling": {**bounds, "window": window, "stabilization": {"scaleIn": patience, "scaleOut": "1s"}},
        "routing": {"queue": {"timeout": "150s", "hold": "150s"}},
    }
    body = {"apiVersion": protocol.API_VERSION, "kind": protocol.KIND, "metadata": {"name": NAME}, "spec": spec}
    text: str = yaml.safe_dump(body)
    return text


@dataclass(frozen=True)
class Answer:
    """One complete answer as its client saw it: when it was asked for, then seconds to and between tokens."""

    asked: float
    ttft: float
    itl: float


class Traffic:
    """Requests at a fixed rate, whether or not earlier ones have ended; their shape may be changed."""

    def __init__(self, url: str, shape: dict[str, Any]) -> None:
        self.url, self.shape = f"{url}/v1/completions", shape
        #: By the number of the request; those that are not complete yet are None.
        self.answers, self.failures = list[Answer | None](), list[str]()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._clock = threading.Thread(target=self._tick)

    def __enter__(self) -> Traffic:
        self._clock.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in (self._clock, *self._threads):
            thread.join(timeout=120)

    def _tick(self) -> None:
        while not self._stop.wait(1 / RATE):
            thread = threading.Thread(target=self._ask, args=(dict(self.shape), len(self._threads)))
            self._threads.append(thread)
            self.answers.append(None)
            thread.start()

    def _ask(self, shape: dict[str, Any], number: int) -> None:
        # No two prompts begin alike: nothing is cached.
        body = {"model": MODEL, **shape, "prompt": f"{number} {shape['prompt']}", "ignore_eos": True}
        asked = time.monotonic()
        try:
            tokens = [time.monotonic() for event in stream(self.url, body) if event.get("choices")]
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")
        else:
            gaps = max(1, shape["max_tokens"] - 1)
            self.answers[number] = Answer(asked, tokens[0] - asked, (tokens[-1] - tokens[0]) / gaps)

    def newest(self, count: int, first: int) -> list[Answer]:
        """Return the answers to the last ``count`` requests of which, from the ``first`` on, none is open before them.

        Fewer are returned where there are not so many yet. Whoever looked at complete answers alone would miss the slow
        ones.
        """
        complete = itertools.takewhile(lambda answer: answer is not None, self.answers[first:])
        return [answer for answer in complete if answer is not None][-count:]


def quantile(values: Iterable[float]) -> float:
    """Return the least value that the promised share of ``values`` does not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(SHARE * len(ordered)) - 1]


def workers(cluster: Cluster, namespace: str) -> int:
    """Return how many worker pods there are, those that are ending too."""
    selector = f"{protocol.LABEL_POOL}={NAME},{protocol.LABEL_ROLE} in (prefill,decode)"
    return len(cluster.json("-n", namespace, "get", "pods", "-l", selector)["items"])


class Watch:
    """Counts worker pods all the time: none beyond the budget may exist, not even while it ends."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=60)

    def _look(self) -> None:
        while not self._stop.wait(0.3):
            self.most = max(self.most, workers(self._cluster, self._namespace))


class Elastic:
    """The pool of a test."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace

    def apply(self, **changes: Any) -> None:
        self.cluster.kubectl("-n", self.namespace, "apply", "-f", "-", input=manifest(**changes))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = pool(self.cluster, self.namespace, NAME).get("status", {})
        return found

    def target(self) -> tuple[int, int]:
        found = self.status().get("scaling", {}).get("target", {})
        return found.get("prefill", -1), found.get("decode", -1)

    def routable(self) -> tuple[int, int]:
        found = self.status()
        return found.get("prefill", {}).get("routable", -1), found.get("decode", {}).get("routable", -1)

    def await_target(self, test: Any, what: str, seconds: float = 120) -> tuple[int, int]:
        wait_until(lambda: test(*self.target()), seconds, f"the target has {what}; it is {self.target()}")
        return self.target()

    def await_decision(self, since: float, test: Any, seconds: float = 120) -> float:
        """Return after how long the first change was decided whose numbers before and after ``test`` takes.

        Times are kept in whole seconds: one more than the change took at most.
        """

        def found() -> list[float]:
            made = [(datetime.fromisoformat(at).timestamp() + 1 - since, *change) for at, *change in self.decisions()]
            return [after for after, *change in made if after >= 0 and test(*change)]

        try:
            wait_until(found, seconds, "the numbers change as foreseen")
        except WaitTimeout as error:
            raise AssertionError(f"{error}: {self.status().get('scaling')}") from None
        return found()[-1]

    def decisions(self) -> list[Decision]:
        """Return when each change was decided, and the numbers before and after it, newest first."""
        made = self.status().get("scaling", {}).get("decisions", [])
        return [
            (item["time"], *((item[k]["prefill"], item[k]["decode"]) for k in ("before", "after"))) for item in made
        ]

    def await_routable(self, test: Any, what: str, seconds: float = 150) -> None:
        wait_until(lambda: test(*self.routable()), seconds, f"there are {what} routable groups")

    def await_objectives(self, traffic: Traffic, requests: int = 30, seconds: float = 120) -> float:
        """Return since when the promised share of ``requests`` that were asked one after the other got what it should.

        Those that were asked before the groups served are slow, and so is whoever stands behind them: for these there
        is time, and then every so many must be on time.
        """
        first = len(traffic.answers)

        def kept() -> bool:
            answers = traffic.newest(requests, first)
            assert len(answers) == requests, f"{len(answers)} complete answers"
            ttft, itl = (quantile(values) for values in zip(*((a.ttft, a.itl) for a in answers), strict=True))
            assert ttft <= TTFT, f"first token after {ttft:.2f} s"
            assert itl <= ITL, f"{itl:.3f} s between tokens"
            return True

        try:
            wait_until(kept, seconds, "the objectives are kept again")
        except WaitTimeout as error:
            waits = [round(answer.ttft, 1) if answer else None for answer in traffic.answers[first:]]
            state = f"routable {self.routable()}, first tokens after {waits}, scaling {self.status().get('scaling')}"
            raise AssertionError(f"{error}; {state}") from None
        return traffic.newest(requests, first)[0].asked


@pytest.fixture
def elastic(twinpool: Cluster, namespace: str) -> Elastic:
    return Elastic(twinpool, namespace)


def test_a_length_shift_moves_the_ratio_within_the_budget_and_over_a_dead_operator(
    elastic: Elastic,
) -> None:
    elastic.apply()
    elastic.await_routable(lambda p, d: (p, d) == (1, 1), "1 and 1")
    url = router_url(elastic.cluster, elastic.namespace, NAME)
    with Watch(elastic.cluster, elastic.namespace) as watch, Traffic(url, WRITING) as traffic:
        elastic.await_target(lambda p, d: p <= 2 and d >= 3, "more decode than prefill")
        elastic.await_routable(lambda _, d: d >= 3, "3 decode")
        cold_start = elastic.status()["scaling"]["figures"]["startSeconds"]
        traffic.shape, shifted, date = READING, time.monotonic(), time.time()
        # Each decision is one write of both numbers. Whether the shift takes one or two depends on where it falls in
        # the window: prefill may be seen to need more before decode is seen to need less, or after.
        took = elastic.await_decision(date, lambda old, new: new[0] > old[0] and new[0] >= 2)
        operator = ("-n", "twinpool-system", "delete", "pod", "--all", "--force", "--grace-period=0", "--wait=false")
        elastic.cluster.kubectl(*operator)
        elastic.await_routable(lambda p, d: p >= 2 and d <= 2, "more prefill and fewer decode")
        kept = elastic.await_objectives(traffic)
    print(
        f"cold start {cold_start:.1f} s, ratio moved after {took:.1f} s, objectives kept after {kept - shifted:.1f} s"
    )
    assert took <= cold_start + 2 * TICK
    assert watch.most <= BUDGET
    assert all(sum(pair) <= BUDGET for _, *change in elastic.decisions() for pair in change)
    assert traffic.failures == []
    assert condition(pool(elastic.cluster, elastic.namespace, NAME), "ScalingActive")["status"] == "True"


def test_without_traffic_no_group_is_left_and_the_next_request_waits_for_one_and_is_answered(elastic: Elastic) -> None:
    elastic.apply(low=0, window="3s", patience="3s")
    wait_until(lambda: elastic.target() == (0, 0), 120, "the target is zero")
    wait_until(lambda: not workers(elastic.cluster, elastic.namespace), 120, "no worker pod is left")
    wait_until(lambda: elastic.status()["router"]["ready"], 120, "the router stays")
    url = router_url(elastic.cluster, elastic.namespace, NAME)
    body = {"model": MODEL, "prompt": "is anybody there?", "max_tokens": 4, "temperature": 0}
    reply = post(f"{url}/v1/completions", body, timeout=200)
    assert reply.status == 200, reply.body
    newest = elastic.status()["scaling"]["decisions"]
    assert any("somebody asks" in item["reason"] and item["after"] == {"prefill": 1, "decode": 1} for item in newest)
