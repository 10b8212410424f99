"""Which rank of a worker a prompt goes to: the one that holds it, where that pays; else the engine chooses."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core.blockhash import chain
from twinpool.core.protocol import RouterConfig
from twinpool.router.logic.asked import Asked
from twinpool.router.logic.chooser import Chooser
from twinpool.router.logic.decisions import Decisions
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.index_exact import Held
from twinpool.router.logic.index_view import MOST_BLOCKS
from twinpool.router.logic.ledger import Ledger
from twinpool.router.logic.request import Request, Route, read
from twinpool.router.logic.seats import names_of, seats_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.core.protocol import Policy

IDS = list(range(1000, 3010))
#: Blocks of the prompt that a worker can have: the last token is always computed.
ALL = (len(IDS) - 1) // 16
FULL = Held(ALL, ALL, ALL)


def workers(role: str, count: int, ranks: int = 2, **more: Any) -> list[Endpoint]:
    return [Endpoint(f"{role}{n}", role, "h", 1, pod=f"{role}{n}", ranks=ranks, **more) for n in range(count)]  # type: ignore[arg-type]


def request(prompt: Any = None, tokens: int = 4) -> Request:
    body = {"model": "m", "prompt": IDS if prompt is None else prompt, "max_tokens": tokens}
    return read(Route.COMPLETIONS, json.dumps(body).encode())


def chooser(pool: Iterable[Endpoint], policy: Policy = "price", **config: Any) -> tuple[Chooser, Ledger]:
    ledger, known = Ledger(), {each.id: each for each in pool}
    made = Chooser(RouterConfig("p", "n", ("m",), policy=policy, **config), ledger, random.Random(1))
    made.ranks.seats = seats_of(known.values())
    made.exact.rely(16, names_of(known, made.ranks.seats) - made.ranks.seats.keys())
    return made, ledger


def located(made: Chooser, held: dict[str, Held], asked: Request | None = None) -> Asked:
    found = made.asked(asked or request())
    return Asked(found.ask, found.keys, found.names, held)


@pytest.mark.parametrize("policy", ["price", "prefix"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_prompt_goes_to_the_rank_that_holds_it(policy: Policy, count: int) -> None:
    pool = workers("prefill", count)
    last = f"prefill{count - 1}"
    made, _ = chooser(pool, policy)
    asked = located(made, {f"{last}#1": FULL})
    for chosen in (made.prefill(asked, pool), made.decode(asked, pool, whole=True)):
        assert (chosen.id, chosen.rank, chosen.seat) == (last, 1, f"{last}#1")
    work = made.sent(asked, chosen)
    assert work.cached == work.sure == 16 * ALL


def test_where_no_rank_has_more_than_others_the_engine_chooses() -> None:
    pool = workers("prefill", 1)
    made, _ = chooser(pool)
    for held in ({}, {"prefill0#0": FULL, "prefill0#1": FULL}):
        chosen = made.prefill(located(made, held), pool)
        assert chosen is pool[0]
        assert chosen.seat == ""
    assert made.prefill(made.asked(request("text " * 400)), pool) is pool[0], "text has no names"
    # What it finds is then the mean of what its ranks have, and no prediction that could fail.
    work = made.sent(located(made, {"prefill0#0": FULL}), pool[0])
    assert (work.cached, work.sure) == (16 * ALL // 2, None)
    assert made.sent(located(made, {}), pool[0]).cached == 0


def test_a_rank_that_is_not_relied_on_is_not_named() -> None:
    pool = workers("prefill", 1)
    made, _ = chooser(pool)
    made.exact.rely(16, {"prefill0#0"})
    assert made.prefill(located(made, {"prefill0#1": FULL}), pool).seat == ""
    assert made.prefill(located(made, {"prefill0#0": FULL}), pool).seat == "prefill0#0"
    asked = located(made, {"prefill0#0": FULL})
    for _ in range(8):
        seat = made.prefill(asked, pool)
        if not seat.seat:
            break
        assert made.prefilled(seat, made.sent(asked, seat), 1.0, cached=0) is False
    assert not made.exact.trusted("prefill0#0"), "its engine contradicts its events"
    assert seat.seat == ""
    assert made.exact.trusted("prefill0#1"), "ranks are judged one by one"
    made.keep({"prefill0"})
    assert made.exact.trusted("prefill0#0"), "a rank that is gone is forgotten"


def test_a_cache_behind_a_queue_is_left_alone() -> None:
    pool = workers("prefill", 1)
    made, ledger = chooser(pool)
    asked = located(made, {"prefill0#1": FULL})
    fresh = made.sent(located(made, {}), pool[0]).seconds
    seat = made.prefill(asked, pool)
    ticket = ledger.admit_at(seat.seat, seat.id, 100, fresh)
    assert made.prefill(asked, pool).seat == "", "the other rank has it sooner"
    ledger.close(ticket)
    assert made.prefill(asked, pool).seat == seat.seat
    # What the engine placed itself may be at any rank, so it does not count against one of them.
    for _ in range(4):
        ledger.admit(seat.id, 100, fresh)
    assert made.prefill(asked, pool).seat == seat.seat
    assert made.sent(asked, seat).before == pytest.approx(2 * fresh, rel=1e-3)
    assert made.sent(asked, pool[0]).before == pytest.approx(2 * fresh, rel=1e-3)


def test_ranks_share_the_work_of_their_worker_and_its_room() -> None:
    one, two = workers("decode", 1, ranks=1, kv_tokens=50_000)[0], workers("wide", 1, kv_tokens=100_000)[0]
    made, ledger = chooser([one, two])
    asked = located(made, {}, request(tokens=100))
    for _ in range(8):
        ledger.admit(one.id, 4000)
        ledger.admit(two.id, 4000)
    assert {made.decode(asked, [one, two], whole=False).id for _ in range(20)} == {two.id}, "half as much at each rank"
    for _ in range(8):
        ledger.admit(two.id, 4000)
    assert {made.decode(asked, [one, two], whole=False).id for _ in range(40)} == {one.id, two.id}, "equals"
    alone, shared = made.first(asked, one, None), made.first(asked, two, None)
    assert alone is not None
    assert alone == shared


def test_what_is_shown_of_a_choice_says_which_rank() -> None:
    pool = workers("prefill", 1)
    made, _ = chooser(pool)
    made.decisions = Decisions(lambda: 0.0)
    made.prefill(located(made, {"prefill0#1": FULL}), pool)
    made.prefill(located(made, {}), pool)
    named, left = made.decisions.last()
    assert [(option.worker, option.rank) for option in named.options] == [("prefill0", None), ("prefill0", 1)]
    assert (named.chosen, named.rank, left.chosen, left.rank) == ("prefill0", 1, "prefill0", None)


def test_whether_to_hand_off_looks_at_ranks() -> None:
    prefills, decodes = workers("prefill", 1), workers("decode", 1)
    made, _ = chooser([*prefills, *decodes], conditional="auto")
    assert not made.hands_off(located(made, {"decode0#1": FULL}), prefills, decodes), "a rank of decode holds it"


def test_policies_that_know_no_prefixes_leave_ranks_to_the_engine() -> None:
    for policy in ("least-load", "round-robin", "random"):
        pool = workers("prefill", 2)
        made, _ = chooser(pool, policy, conditional="auto")  # type: ignore[arg-type]
        asked = located(made, {"prefill0#1": FULL, "prefill1#1": FULL})
        assert {made.prefill(asked, pool).seat for _ in range(9)} == {""}
        assert made.prefill(asked, pool[:1]) is pool[0]


def test_names_of_blocks_are_those_of_the_prompt() -> None:
    made, _ = chooser(workers("prefill", 1))
    assert located(made, {}).names == tuple(chain(IDS, 16, MOST_BLOCKS))
