"""What ``/debug`` shows of choices: why a worker got a request, a bounded number of them, and only while one looks."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, get_args

import msgspec
import pytest

from twinpool.core.protocol import Policy, RouterConfig
from twinpool.router.logic import decisions, lag
from twinpool.router.logic.breaker import FIRST_SECONDS, SLOW_START_SECONDS, Breaker
from twinpool.router.logic.chooser import Chooser
from twinpool.router.logic.decisions import Decisions
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.ledger import Ledger
from twinpool.router.logic.request import Route, read

if TYPE_CHECKING:
    from twinpool.router.logic.asked import Asked

P = [Endpoint(f"id-p{n}", "prefill", "h", 1, pod=f"p{n}") for n in range(3)]
D = [Endpoint(f"id-d{n}", "decode", "h", 1, pod=f"d{n}") for n in range(2)]
SECRET = "a word that nobody else may read"


def watched(**config: object) -> tuple[Chooser, Ledger, Asked]:
    ledger = Ledger()
    ours = Chooser(RouterConfig("p", "n", ("m",), **config), ledger, random.Random(1))  # type: ignore[arg-type]
    ours.decisions = Decisions(lambda: 1000.0)
    body = {"model": "m", "prompt": f"{SECRET} " * 200, "max_tokens": 20}
    return ours, ledger, ours.asked(read(Route.COMPLETIONS, json.dumps(body).encode()))


def test_a_choice_by_price_says_what_each_worker_would_have_cost() -> None:
    ours, ledger, asked = watched(policy="price", conditional="auto")
    ledger.admit("id-p0", 5000, prefill=2.0)
    ours.sent(asked, P[1])
    chosen = ours.prefill(asked, P)
    remote = ours.hands_off(asked, P, D)
    for whole in (False, True):
        ours.decode(asked, D, whole=whole)
    assert ours.decisions is not None
    prefill, handoff, decode, whole_one = ours.decisions.last()
    assert (prefill.at, prefill.choice, prefill.chosen, chosen.pod) == (1000.0, "prefill", "p1", "p1")
    assert (prefill.prompt_tokens, prefill.output_tokens) == (asked.ask.prompt, 20)
    prices = {option.worker: option.price for option in prefill.options}
    assert min(prices, key=lambda name: prices[name] or 0.0) == "p1"
    assert max(prices, key=lambda name: prices[name] or 0.0) == "p0"
    busy, warm, _ = prefill.options
    assert (busy.backlog, busy.requests, busy.tokens) == (2.0, 1, 5000)
    assert warm.cached == warm.held > 0
    assert (handoff.choice, handoff.chosen) == ("handoff", "remote" if remote else "local")
    assert handoff.saved > 0
    assert (decode.choice, whole_one.choice) == ("decode", "whole")
    assert all(option.price for one in (decode, whole_one) for option in one.options)
    assert SECRET.encode() not in msgspec.json.encode(ours.decisions.last())


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_policy_says_whom_it_chose_and_a_bounded_number_of_times(policy: Policy) -> None:
    ours, _, asked = watched(policy=policy)
    assert ours.decisions is not None
    chosen = [ours.prefill(asked, P).pod for _ in range(decisions.KEPT + 5)]
    assert [one.chosen for one in ours.decisions.last()] == chosen[5:]
    ours.decode(asked, D[:1], whole=True)
    assert ours.decisions.last()[-1].chosen == "d0"
    ours.decisions = None
    assert ours.prefill(asked, P) in P


def test_lag_is_the_worst_of_the_last_looks() -> None:
    late = lag.Lag()
    assert late.state() == {"lastMs": 0.0, "worstMs": 0.0}
    late.woke(1.0, 1.5)
    late.woke(2.0, 1.9)
    assert late.state() == {"lastMs": 0.0, "worstMs": 500.0}
    for _ in range(lag.KEPT):
        late.woke(3.0, 3.002)
    assert late.state() == {"lastMs": 2.0, "worstMs": 2.0}


def test_a_breaker_says_whom_it_avoids_and_whose_share_grows() -> None:
    breaker = Breaker()
    assert breaker.state(0.0) == {}
    breaker.failed("a", 0.0)
    breaker.keep({"a", "b"}, ("a",), 0.0)
    breaker.keep({"a", "b"}, ("a", "b"), 0.0)
    assert breaker.state(0.0) == {"a": {"avoidedSeconds": FIRST_SECONDS}, "b": {"share": 0.1}}
    assert breaker.state(SLOW_START_SECONDS * 2) == {"a": {"avoidedSeconds": 0.0}, "b": {"share": 1.0}}
