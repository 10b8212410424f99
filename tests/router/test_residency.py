"""LoRA adapters that not every engine has at hand: where one was used last is cheaper by the time to bring it in."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.protocol import RouterConfig
from twinpool.router.logic.chooser import Chooser
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.ledger import Ledger
from twinpool.router.logic.request import Request, Route, read, with_adapter
from twinpool.router.logic.residency import LOAD_SECONDS, Residency

P = [Endpoint(f"p{n}", "prefill", "h", 1) for n in range(4)]
D = [Endpoint(f"d{n}", "decode", "h", 1) for n in range(4)]


def chooser(slots: int = 2, **config: Any) -> tuple[Chooser, Ledger]:
    ledger = Ledger()
    settings = RouterConfig("p", "n", ("m",), policy="price", adapters=("a", "b", "c"), adapter_slots=slots, **config)
    return Chooser(settings, ledger, random.Random(1)), ledger


def short(model: str) -> Request:
    request = read(Route.COMPLETIONS, json.dumps({"model": model, "prompt": "hi", "max_tokens": 5}).encode())
    return request if model == "m" else with_adapter(request)


def test_an_adapter_is_asked_for_where_it_is_at_hand() -> None:
    ours, ledger = chooser()
    asked = ours.asked(short("a"))
    ours.sent(asked, P[2])
    ours.received(asked, D[1])
    assert {ours.prefill(asked, P).id for _ in range(20)} == {"p2"}
    assert {ours.decode(asked, D, whole=False).id for _ in range(20)} == {"d1"}
    assert {ours.decode(asked, D, whole=True).id for _ in range(20)} == {"d1"}
    ledger.admit("p2", 10, prefill=2 * LOAD_SECONDS)
    assert "p2" not in {ours.prefill(asked, P).id for _ in range(20)}, "bringing it in is cheaper than to wait"
    ours.keep({"p0", "d0"})
    assert {ours.decode(asked, D, whole=False).id for _ in range(60)} == {"d0", "d1", "d2", "d3"}


def test_requests_without_an_adapter_and_pools_that_keep_all_do_not_ask() -> None:
    ours, _ = chooser()
    assert ours.asked(short("m")).adapter == ""
    assert ours.asked(short("a")).adapter == "a"
    all_kept, _ = chooser(slots=0)
    assert all_kept.asked(short("a")).adapter == ""
    assert all(one.load == 0 for one in ours._candidates(ours.asked(short("m")), P)[1])


def test_an_engine_keeps_what_it_used_last() -> None:
    residency = Residency(2)
    assert residency.load("p0", "a") == LOAD_SECONDS
    for adapter in ("a", "b", "a", "c"):
        residency.went("p0", adapter)
    assert [residency.load("p0", adapter) for adapter in "abc"] == [0.0, LOAD_SECONDS, 0.0]
    assert residency.load("p1", "a") == LOAD_SECONDS
    residency.keep({"p1"})
    assert residency.load("p0", "a") == LOAD_SECONDS


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60), st.integers(1, 4))
def test_no_more_are_at_hand_than_an_engine_keeps(visits: list[tuple[int, int]], slots: int) -> None:
    residency, truth = Residency(slots), dict[int, list[int]]()
    for worker, adapter in visits:
        residency.went(str(worker), str(adapter))
        used = truth.setdefault(worker, [])
        truth[worker] = [*(one for one in used if one != adapter), adapter][-slots:]
    for worker in range(4):
        found = [adapter for adapter in range(10) if not residency.load(str(worker), str(adapter))]
        assert found == sorted(truth.get(worker, []))
