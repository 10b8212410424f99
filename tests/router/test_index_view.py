"""What a router process makes of the exact index, and when it falls back to the estimate."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from twinpool.core.blockhash import chain
from twinpool.core.protocol import RouterConfig
from twinpool.router.logic.asked import Asked
from twinpool.router.logic.chooser import Chooser
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.index_approximate import ApproximateIndex
from twinpool.router.logic.index_exact import Held
from twinpool.router.logic.index_view import MOST_BLOCKS, Cached, ExactView
from twinpool.router.logic.ledger import Ledger
from twinpool.router.logic.request import Request, Route, cache_salt, prompt_ids, read, with_adapter

P = [Endpoint(f"p{n}", "prefill", "h", 1) for n in range(4)]
IDS = list(range(1000, 3010))


def request(prompt: Any = None, **fields: Any) -> Request:
    body = {"model": "m", "prompt": IDS if prompt is None else prompt, "max_tokens": 4, **fields}
    return read(Route.COMPLETIONS, json.dumps(body).encode())


def chooser(relied: frozenset[str], size: int = 16) -> Chooser:
    made = Chooser(RouterConfig("p", "n", ("m",), policy="price"), Ledger(), random.Random(1))
    made.exact.rely(size, relied)
    return made


def located(asked: Asked, **held: Held) -> Asked:
    return Asked(asked.ask, asked.keys, asked.names, held)


ALL = frozenset(worker.id for worker in P)


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ([1, 2], [1, 2]),
        ([[3]], [3]),
        ([], []),
        ("text", None),
        (["text"], None),
        ([[1], [2]], None),
        ([-1], None),
        ([2**32], None),
        ([1.5], None),
    ],
)
def test_token_ids_of_a_prompt(prompt: Any, ids: list[int] | None) -> None:
    assert prompt_ids(request(prompt).fields) == ids
    assert prompt_ids({}) is None


def test_the_salt_of_a_cache() -> None:
    assert cache_salt(request().fields) is None
    assert cache_salt(request(cache_salt="team").fields) == "team"
    assert cache_salt(request(cache_salt=7).fields) is None


def test_blocks_are_named_only_while_somebody_is_relied_on() -> None:
    nobody = chooser(frozenset(), size=0)
    assert nobody.asked(request()).names == ()
    assert nobody.exact.names(IDS, {}) == ()
    ours = chooser(ALL)
    asked = ours.asked(request())
    assert asked.names == tuple(chain(IDS, 16, MOST_BLOCKS))
    assert asked.ask.prompt == len(IDS)
    assert ours.asked(request(cache_salt="team")).names == tuple(chain(IDS, 16, MOST_BLOCKS, "team"))
    assert ours.asked(request("text")).names == ()
    adapted = ours.asked(with_adapter(request(model="sql")))
    assert adapted.names == (), "engines name an adapter's blocks by it too"
    assert adapted.keys[0] != asked.keys[0], "its text is found among its own"
    assert ours.asked(request([])).ask.prompt == 1


def test_a_prompt_goes_to_the_worker_that_has_it_by_its_events() -> None:
    ours = chooser(ALL)
    asked = located(ours.asked(request()), p2=Held(100, 100, 100))
    assert {ours.prefill(asked, P).id for _ in range(20)} == {"p2"}
    work = ours.sent(asked, P[2])
    assert (work.cached, work.sure) == (1600, 1600)
    assert ours.sent(asked, P[1]).sure == 0
    assert ours.sent(located(asked, p2=Held(1, 400, 3)), P[2]).sure is None, "what is only expected is no prediction"


def test_an_estimate_stands_in_where_events_do_not_say() -> None:
    ours = chooser(frozenset({"p0"}))
    long = request(list(range(1000, 3000)))
    asked = ours.asked(long)
    ours.sent(asked, P[1])
    assert ours.prefill(located(asked), P).id == "p1"
    assert ours.prefill(asked, P).id == "p1", "no answer came"
    ours.emptied("p1")
    assert ours.sent(asked, P[1]).cached == 0


def test_an_engine_that_contradicts_its_events_is_estimated_until_they_agree_again() -> None:
    ours = chooser(ALL)
    asked = located(ours.asked(request()), p2=Held(100, 100, 100))
    for _ in range(8):
        assert ours.prefilled(P[2], ours.sent(asked, P[2]), 1.0, cached=0) is False
    assert not ours.exact.trusted("p2")
    assert ours.sent(asked, P[2]).cached < 1600
    assert ours.sent(asked, P[2]).sure == 1600, "still compared"
    for _ in range(16):
        assert ours.prefilled(P[2], ours.sent(asked, P[2]), 1.0, cached=1600) is True
    assert ours.sent(asked, P[2]).cached == 1600
    assert ours.prefilled(P[2], ours.sent(asked, P[2]), 1.0, cached=None) is None
    ours.keep({"p0"})
    assert ours.exact.trusted("p2")


def test_new_prompts_do_not_outvote_the_reports_that_contradict_events() -> None:
    view = ExactView()
    view.rely(16, {"p0"})
    for _ in range(16):
        view.judge("p0", 16, 0)
        for _ in range(9):
            assert view.judge("p0", 0, 0), "right, and says nothing of events"
    assert not view.trusted("p0")


def test_one_prediction_in_ten_may_fail() -> None:
    view = ExactView()
    view.rely(16, {"p0"})
    for turn in range(200):
        view.judge("p0", 64, 0 if turn % 10 == 9 else 64)
        assert view.trusted("p0")


def test_an_engine_computes_the_last_token_and_shares_whole_blocks() -> None:
    view = ExactView()
    assert view.cached("p0", {}, 9) is None
    view.rely(16, {"p0"})
    assert view.cached("p0", {"p0": Held(4, 4, 4)}, 64) == Cached(48, 48, True)
    assert view.cached("p0", {"p0": Held(1, 3, 2)}, 65) == Cached(32, 48, False)
    assert view.cached("p0", {}, 64) == Cached(0, 0, True)
    assert view.cached("p1", {}, 64) is None
    view.judge("p0", 0, 15)
    assert view.judge("p0", 16, 0) is False


def test_a_worker_that_lost_all_is_forgotten_by_the_estimate() -> None:
    index = ApproximateIndex(1024)
    index.learn([1, 2], "a")
    index.forget("a")
    index.forget("unknown")
    assert index.leading([1, 2], ["a"]) == {}
