"""Sessions: a client that comes back is expected where it was, for as much as that saves and no more."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from twinpool.core.protocol import RouterConfig
from twinpool.router.logic import price
from twinpool.router.logic.chooser import Chooser
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.headers import forward
from twinpool.router.logic.index_exact import Held
from twinpool.router.logic.ledger import Ledger
from twinpool.router.logic.request import Request, Route, read
from twinpool.router.logic.sessions import Sessions, name_of
from twinpool.router.logic.warmth import HALF_LIFE

if TYPE_CHECKING:
    from twinpool.router.logic.asked import Asked

P = [Endpoint(f"p{n}", "prefill", "h", 1) for n in range(4)]
D = [Endpoint(f"d{n}", "decode", "h", 1) for n in range(4)]


def chat(text: str, **more: Any) -> Request:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
    return read(Route.CHAT, json.dumps(body).encode())


def chooser(seed: int = 1, **config: Any) -> tuple[Chooser, Ledger]:
    ledger = Ledger()
    settings_ = RouterConfig("p", "n", ("m",), policy=config.pop("policy", "price"), **config)
    return Chooser(settings_, ledger, random.Random(seed)), ledger


def test_a_short_prompt_returns_to_its_sessions_last_worker_and_nobody_elses() -> None:
    ours, _ = chooser()
    short = chat("x" * 380)
    assert ours.asked(short).keys == (), "too short for a block"
    for session in range(1, 9):
        ours.sent(ours.asked(short, session, 0.0), P[session % 4])
        ours.received(ours.asked(short, session, 0.0), D[session % 4])
    for session in range(1, 9):
        asked = ours.asked(short, session, 1.0)
        assert {ours.prefill(asked, P).id for _ in range(8)} == {f"p{session % 4}"}
        assert {ours.decode(asked, D, whole=False).id for _ in range(8)} == {f"d{session % 4}"}
    assert len({ours.prefill(ours.asked(short, 99, 1.0), P).id for _ in range(40)}) == 4
    assert len({ours.prefill(ours.asked(short), P).id for _ in range(40)}) == 4


def test_what_a_session_holds_fades_with_time() -> None:
    sessions = Sessions()
    sessions.went(1, "prefill", "p0", 1000, (), 0.0)
    assert sessions.held(1, (), 0.0) == {"p0": 1000}
    assert sessions.held(1, (), HALF_LIFE) == {"p0": 500}
    assert sessions.held(1, (), 20 * HALF_LIFE) == {"p0": 0}
    sessions.went(1, "prefill", "p1", 10, (), 1.0)
    sessions.went(1, "decode", "d0", 10, (), 1.0)
    assert sessions.held(1, (), 1.0) == {"p1": 10, "d0": 10}, "one place for each role, the last"
    assert sessions.held(2, (), 1.0) is None


def test_text_that_contradicts_a_session_is_believed() -> None:
    ours, _ = chooser()
    begun = chat("a" * 2300)
    ours.sent(ours.asked(begun, 7, 0.0), P[2])
    goes_on, other = chat("a" * 2300 + "b" * 300), chat("c" * 2600)
    assert ours.asked(goes_on, 7, 0.0).returned == {"p2": begun.prompt_tokens}
    assert ours.asked(other, 7, 0.0).returned == {}
    assert ours.asked(chat("short"), 7, 0.0).returned == {}, "shorter than the blocks of the last one"
    by_text = ours.sent(ours.asked(goes_on), P[2]).cached
    ours, _ = chooser()
    ours.sent(ours.asked(begun, 7, 0.0), P[2])
    assert by_text < ours.sent(ours.asked(goes_on, 7, 0.0), P[2]).cached <= begun.prompt_tokens, "the tail counts too"


def test_what_events_say_and_what_engines_report_outweigh_a_session() -> None:
    ours, _ = chooser()
    ours.exact.rely(16, {"p0"})
    short = chat("x" * 300)
    ours.sent(ours.asked(short, 7, 0.0), P[0])
    asked = replace(ours.asked(short, 7, 0.0), held={"p1": Held(0, 0, 0)})
    assert ours.sent(asked, P[0]).cached == 0, "its events say that it has nothing"
    ours.index.learn([1], "p1")
    for _ in range(60):
        ours.index.report("p1", 100, 0)
    ours.sent(ours.asked(short, 8, 0.0), P[1])
    assert ours.sent(ours.asked(short, 8, 0.0), P[1]).cached <= short.prompt_tokens * 0.1


@given(
    loads=st.lists(st.tuples(st.integers(0, 20), st.floats(0.0, 0.05)), min_size=4, max_size=4),
    last=st.integers(0, 3),
    size=st.integers(10, 480),
    decode=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=300)
def test_a_session_never_costs_more_than_its_credit(
    loads: list[tuple[int, float]], last: int, size: int, decode: bool, seed: int
) -> None:
    """Without the session, the chosen worker's price is at most the credit (and the tie) above the least."""
    ours, ledger = chooser(seed)
    workers = D if decode else P
    short = chat("x" * size)
    ours.sent(ours.asked(short, 7, 0.0), workers[last])
    for worker, (count, seconds) in zip(workers, loads, strict=True):
        for _ in range(count):
            ledger.admit(worker.id, 1000, 0.0 if decode else seconds)
    without, with_session = (_prices(ours, ours.asked(short, session), workers, decode) for session in (0, 7))
    credit = max(0.0, without[last] - with_session[last])
    asked = ours.asked(short, 7, 0.0)
    chosen = ours.decode(asked, D, whole=True) if decode else ours.prefill(asked, P)
    place = workers.index(chosen)
    least = min(without)
    assert without[place] <= 1.05 * least + (credit if place == last else 0.0) + 1e-9


def _prices(ours: Chooser, asked: Asked, workers: list[Endpoint], decode: bool) -> list[float]:
    _, candidates = ours._candidates(asked, workers)
    prices = ours.foresight.prices
    if not decode:
        return price.prefill_prices(asked.ask, candidates, prices)
    rng = random.Random(0)
    return [price.cheapest_whole(asked.ask, (one,), prices, rng).price for one in candidates]


def test_a_loaded_worker_is_left_whatever_the_session_says() -> None:
    ours, ledger = chooser()
    asked = ours.asked(chat("x" * 300), 7, 0.0)
    ours.sent(asked, P[0])
    ledger.admit("p0", 100_000, prefill=30.0)
    assert "p0" not in {ours.prefill(ours.asked(chat("x" * 300), 7, 0.0), P).id for _ in range(20)}


def test_of_many_workers_the_sessions_last_one_is_looked_at() -> None:
    ours, _ = chooser()
    many = [Endpoint(f"p{n}", "prefill", "h", 1) for n in range(200)]
    short = chat("x" * 380)
    ours.sent(ours.asked(short, 7, 0.0), many[150])
    asked = ours.asked(short, 7, 0.0)
    assert {ours.prefill(asked, many).id for _ in range(10)} == {"p150"}


def test_the_session_is_that_of_the_header_or_of_the_body_and_of_one_client() -> None:
    nothing, named = chat("x").fields, chat("x", prompt_cache_key="s1").fields
    assert name_of(b"", nothing, "team") == 0
    assert name_of(b"", chat("x", prompt_cache_key=None).fields, "team") == 0
    assert name_of(b"", chat("x", prompt_cache_key="").fields, "team") == 0
    names = {
        name_of(b"s", nothing, "a"),
        name_of(b"s", nothing, "b"),
        name_of(b"", named, "a"),
        name_of(b"t", named, "a"),
    }
    assert len(names) == 4
    assert name_of(b"s", nothing, "a") == name_of(b"s", named, "a"), "the header says it"
    headers = ((b"x-session-id", b"s"), (b"accept", b"*/*"))
    forwarded = forward(headers, b"id")
    assert forwarded.session == b"s"
    assert b"x-session-id: s\r\n" in forwarded.decode, "engines get to see it"
    assert forward(headers[1:], b"id").session == b""
    assert forward(((b"connection", b"x-session-id"), *headers), b"id").session == b""


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["prefill", "decode"])), max_size=40))
def test_no_more_sessions_are_remembered_than_there_is_room_for(visits: list[tuple[int, str]]) -> None:
    sessions, order = Sessions(capacity=4), list[int]()
    for now, (session, role) in enumerate(visits):
        sessions.went(session, role, "w", 10, (), float(now))
        order = [one for one in order if one != session] + [session]
    assert len(sessions) == min(4, len(set(order)))
    assert [one for one in order if sessions.held(one, (), 1e3) is not None] == order[-4:]


def test_requests_without_a_session_leave_nothing_behind() -> None:
    ours, _ = chooser()
    asked = ours.asked(chat("x" * 3000))
    ours.sent(asked, P[0])
    assert (asked.session, asked.returned, len(ours.sessions)) == (0, None, 0)
