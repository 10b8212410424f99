"""One process's choices: what it learns, what it assumes of its copies, and when it does without a handoff."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import TYPE_CHECKING, Any, get_args

import pytest
from msgspec.structs import replace

from twinpool.core.blockhash import chain
from twinpool.core.economics import ASSUMED
from twinpool.core.protocol import Policy, RouterConfig
from twinpool.router.logic.asked import Asked, Work
from twinpool.router.logic.chooser import Chooser
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.index_exact import Held
from twinpool.router.logic.ledger import Ledger, Load
from twinpool.router.logic.policy import Ask
from twinpool.router.logic.request import Route, cached_tokens, read

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.router.logic.request import Request

P = [Endpoint(f"p{n}", "prefill", "h", 1) for n in range(4)]
D = [Endpoint(f"d{n}", "decode", "h", 1) for n in range(4)]


def request(text: str = "word " * 2000, tokens: int = 20) -> Request:
    return read(Route.COMPLETIONS, json.dumps({"model": "m", "prompt": text, "max_tokens": tokens}).encode())


def chooser(copies: int = 1, **config: Any) -> tuple[Chooser, Ledger]:
    ledger = Ledger(copies - 1)
    settings = RouterConfig("p", "n", ("m",), **config)
    return Chooser(settings, ledger, random.Random(1)), ledger


@pytest.mark.parametrize("policy", get_args(Policy))
def test_every_policy_chooses_among_the_workers_and_uses_all_of_them_for_different_prompts(policy: Policy) -> None:
    ours, ledger = chooser(policy=policy)
    used = set()
    for number in range(64):
        asked = ours.asked(request(f"{number} " * 2000))
        prefill, decode = ours.prefill(asked, P), ours.decode(asked, D, whole=False)
        ledger.admit(prefill.id, asked.ask.prompt, ours.sent(asked, prefill).seconds)
        ledger.admit(decode.id, asked.ask.prompt + asked.ask.output)
        ours.received(asked, decode)
        used |= {prefill.id, decode.id}
    assert used == {worker.id for worker in [*P, *D]}
    assert ours.prefill(Asked(Ask(1, 1)), P[:1]) is P[0]


@pytest.mark.parametrize("policy", ["prefix", "price"])
def test_a_prompt_returns_to_the_worker_that_has_it(policy: Policy) -> None:
    ours, _ = chooser(policy=policy)
    asked = ours.asked(request())
    first = ours.prefill(asked, P)
    assert ours.sent(asked, first).cached == 0
    assert {ours.prefill(asked, P).id for _ in range(20)} == {first.id}
    again = ours.sent(asked, first)
    assert 0.9 * asked.ask.prompt < again.cached < asked.ask.prompt
    ours.keep({worker.id for worker in P if worker is not first})
    assert ours.sent(asked, first).cached == 0, "a worker that is gone holds nothing"


def test_an_engine_that_has_less_than_foretold_is_believed() -> None:
    ours, _ = chooser(policy="price")
    asked = ours.asked(request())
    ours.sent(asked, P[0])
    for _ in range(60):
        ours.prefilled(P[0], ours.sent(asked, P[0]), 1.0, cached=0)
    assert ours.sent(asked, P[0]).cached < 0.1 * asked.ask.prompt
    ours.prefilled(P[0], ours.sent(asked, P[0]), 1.0, cached=None)


def test_a_decode_worker_without_room_for_the_kv_is_passed_over() -> None:
    full, roomy = (dataclasses.replace(D[number], kv_tokens=room) for number, room in enumerate((20_000, 200_000)))
    ours, ledger = chooser(policy="price")
    asked = ours.asked(request(tokens=500))
    for worker in (full, roomy):
        ledger.admit(worker.id, 19_500)
    assert {ours.decode(asked, [full, roomy], whole=False).id for _ in range(20)} == {roomy.id}
    assert {ours.decode(asked, D[:2], whole=False).id for _ in range(40)} == {D[0].id, D[1].id}, "nothing is known"


def test_policies_that_know_no_prefixes_do_not_read_prompts() -> None:
    for policy in ("random", "round-robin", "least-load"):
        ours, _ = chooser(policy=policy)
        assert ours.asked(request()).keys == ()
        assert ours.index.table.capacity == 8
    ours, _ = chooser(policy="least-load", conditional="auto")
    assert ours.asked(request()).keys
    short = ours.asked(request("short"))
    assert short.keys == ()
    assert ours.sent(short, P[0]).cached == 0


def test_a_process_takes_its_copies_to_have_as_much_work_as_itself() -> None:
    # The prompt is cached behind a backlog: alone, waiting for it pays; behind four times of it, it does not.
    many = [Endpoint(f"p{n}", "prefill", "h", 1) for n in range(16)]
    for copies, stays in ((1, True), (4, False)):
        ours, ledger = chooser(copies, policy="price")
        asked = ours.asked(request())
        fresh = ours.sent(asked, many[0]).seconds
        ledger.admit("p0", 100, 0.7 * fresh)
        assert (ours.prefill(asked, many) is many[0]) is stays


def test_the_work_of_others_counts_where_it_is_known() -> None:
    for policy in ("price", "least-load"):
        ours, ledger = chooser(4, policy=policy)
        asked = ours.asked(request())
        ledger.elsewhere({"p0": Load(tokens=10**6, requests=9, prefill=10**8)}, 0)
        assert "p0" not in {ours.prefill(asked, P).id for _ in range(20)}
        assert ours.sent(asked, P[0]).before == 100.0
        ledger.elsewhere({}, 0)
        assert "p0" in {ours.prefill(asked, P).id for _ in range(40)}


def test_predictions_follow_what_is_observed() -> None:
    plain, _ = chooser(policy="round-robin")
    plain.prefilled(P[0], plain.sent(plain.asked(request()), P[0]), 100.0, None)
    assert plain.foresight.prefill.factor == 1.0, "nothing there is priced"
    ours, ledger = chooser(policy="price")
    asked = ours.asked(request())
    ledger.admit("p0", 100, 3.0)
    work = ours.sent(asked, P[0])
    assert work.before == 3.0
    assert ours.expected(work) == work.before + work.seconds
    assert plain.expected(work) == 0.0
    for _ in range(200):
        ours.prefilled(P[0], work, 10 * (work.before + work.seconds), None)
    assert ours.foresight.prefill.factor == pytest.approx(10, rel=0.05)
    assert ours.expected(work) == pytest.approx(10 * (work.before + work.seconds), rel=0.05)


@pytest.mark.parametrize(("conditional", "handed"), [("always", True), ("never", False)])
def test_whether_to_hand_off_can_be_fixed(conditional: str, handed: bool) -> None:
    ours, _ = chooser(conditional=conditional)
    assert ours.hands_off(ours.asked(request()), P, D) is handed


def test_auto_hands_off_while_decode_is_busy_and_not_while_prefill_is_behind() -> None:
    def decided(load: Sequence[tuple[str, int, float]], prefills: Sequence[Endpoint] = P) -> bool:
        ours, ledger = chooser(conditional="auto")
        for worker, tokens, seconds in load:
            ledger.admit(worker, tokens, seconds)
        return ours.hands_off(ours.asked(request("word " * 20_000)), prefills, D)

    busy = [(worker.id, 1000, 0.0) for worker in D for _ in range(50)]
    behind = [(worker.id, 1000, 30.0) for worker in P]
    assert decided(busy)
    assert not decided(behind)
    assert decided([], ()), "the handoff itself says that there is no prefill worker, and does without"


def test_price_sends_whole_requests_to_the_worker_with_the_least_prefill_to_do() -> None:
    ours, ledger = chooser(policy="price")
    for worker in D[1:]:
        ledger.admit(worker.id, 100, 5.0)
    assert ours.decode(ours.asked(request()), D, whole=True).id == "d0"


@pytest.mark.parametrize(
    ("answer", "cached"),
    [
        ('{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}}', 7),
        ('{"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": null}}}', None),
        ('{"usage": {"prompt_tokens": 9, "prompt_tokens_details": null}}', None),
        ('{"usage": {"prompt_tokens": 9}}', None),
        ('{"usage": null}', None),
        ("{}", None),
        ('{"usage": 3}', None),
        ("not JSON", None),
    ],
)
def test_what_an_engine_says_of_its_cache(answer: str, cached: int | None) -> None:
    assert cached_tokens(answer.encode()) == cached


def test_the_first_token_is_foretold_and_what_comes_corrects_it() -> None:
    plain, _ = chooser(policy="round-robin")
    assert plain.first(plain.asked(request()), D[0], None) is None
    ours, ledger = chooser(policy="price")
    asked = ours.asked(request("word " * 5000))
    first = ours.first(asked, D[0], None)
    assert first is not None
    assert first.seconds == pytest.approx(first.pull + first.step)
    ledger.admit("d0", 100_000)
    busy = ours.first(asked, D[0], None)
    assert busy is not None
    assert busy.seconds > first.seconds
    for number in range(200):
        ours.came(D[0], first, 3 * first.pull + first.step, float(number))
    ours.came(D[0], first, 1000.0, 1000.0)  # a stall
    again = ours.first(asked, D[1], None)
    assert again is not None
    assert again.seconds == pytest.approx(3 * first.pull + first.step, rel=0.1)
    assert again.pull == first.pull
    whole = ours.first(asked, D[1], ours.sent(asked, D[1]))
    assert whole is not None
    assert whole.seconds == pytest.approx(whole.prefill + whole.step)


def test_a_busy_worker_teaches_no_more_than_once_in_a_moment() -> None:
    ours, _ = chooser(policy="price", disaggregated=False)
    first = ours.first(ours.asked(request("word " * 5000)), D[0], Work(1.0, 0.0, 0))
    assert first is not None
    for _ in range(64):  # a new router learns from all
        ours.came(D[0], first, 2.0, 0.0)
    for now, samples in ((1.0, 65), (1.001, 65), (1.0025, 66), (1.003, 66)):
        ours.came(D[0], first, 2.0, now)
        assert ours.foresight.prefill.samples == samples
    ours.came(D[1], first, 2.0, 1.003)
    assert ours.foresight.prefill.samples == 67, "another worker is another matter"


def test_where_there_is_no_prefill_role_whole_requests_teach_it() -> None:
    for disaggregated, factor in ((False, 3.0), (True, 1.0)):
        ours, _ = chooser(policy="price", disaggregated=disaggregated)
        asked = ours.asked(request("word " * 5000))
        work = ours.sent(asked, D[0])
        first = ours.first(asked, D[0], work)
        assert first is not None
        for number in range(200):
            ours.came(D[0], first, 3 * first.prefill + first.step, float(number))
        assert ours.foresight.prefill.factor == pytest.approx(factor, rel=0.1)
        assert ours.expected(work, "d0") == pytest.approx(3 * first.prefill, rel=0.1)


def test_a_worker_that_takes_longer_than_others_gets_less() -> None:
    ours, _ = chooser(policy="price")
    asked = ours.asked(request("word " * 5000))
    work = Work(0.2, 0.0, 0)
    for number in range(400):
        ours.prefilled(P[number % 4], work, 0.6 if number % 4 == 0 else 0.2, None)
    assert ours.foresight.pace("p0") > 2
    assert ours.foresight.pace("p1") < 1.2
    assert ours.foresight.pace("unknown") == 1
    assert ours.foresight.prices.token == pytest.approx(ASSUMED.token * ours.foresight.prefill.factor, rel=0.005)
    assert {ours.prefill(asked, P).id for _ in range(60)} == {"p1", "p2", "p3"}
    assert ours.foresight.state()["p0"][1] == 100
    ours.keep({"p1"})
    assert ours.foresight.pace("p0") == 1
    assert set(ours.foresight.state()) == {"prefill", "handoff", "p1"}


def test_of_many_workers_those_that_hold_the_most_are_priced_and_some_others() -> None:
    many = [Endpoint(f"p{number}", "prefill", "h", 1) for number in range(200)]
    for policy in ("price", "prefix", "least-load"):
        ours, ledger = chooser(policy=policy)
        first, second = ours.asked(request()), ours.asked(request("another " * 1000))
        ours.sent(first, many[150])
        ours.sent(second, many[60])
        ledger.admit("p7", 10**6, 100.0)
        chosen = {ours.prefill(first, many).id for _ in range(100)}
        if policy == "least-load":
            assert len(chosen) > 20, "one of those drawn that have nothing to do"
            assert "p7" not in chosen
        else:
            assert chosen == {"p150"}
        assert ours.prefill(second, many[:100]).id == "p60" or policy == "least-load"


def test_a_prompt_to_an_adapter_has_names_of_its_own_where_its_source_is_known() -> None:
    plain = read(Route.COMPLETIONS, b'{"model": "sql", "prompt": [1, 2, 3, 4, 5, 6, 7, 8]}')
    ours, _ = chooser(policy="price", adapters=("sql", "legal"), adapter_sources=("org/sql",))
    ours.exact.rely(4, {"p0"})
    names = [ours.asked(replace(plain, adapter=adapter)).names for adapter in ("", "sql", "legal")]
    assert names[0] == tuple(chain(range(1, 9), 4, 9))
    assert names[1] == tuple(chain(range(1, 9), 4, 9, adapter=("sql", "org/sql")))
    assert names[2] == (), "its blocks cannot be named"


def test_of_many_workers_those_that_are_known_to_hold_something_are_priced() -> None:
    many = [Endpoint(f"p{number}", "prefill", "h", 1) for number in range(200)]
    ours, _ = chooser(policy="price")
    ours.exact.rely(16, {worker.id for worker in many})
    asked = replace(ours.asked(request()), keys=(), held={"p90": Held(100, 100, 0), "gone": Held(1, 1, 0)})
    assert {ours.prefill(asked, many).id for _ in range(30)} == {"p90"}
