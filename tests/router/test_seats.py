"""Ranks behind one endpoint: their names, where they publish, and what each has to do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.ledger import Ledger, Load
from twinpool.router.logic.seats import (
    endpoint_of,
    load_at,
    loads,
    names_of,
    publishers,
    seat_name,
    seats_of,
    shared,
)

if TYPE_CHECKING:
    from twinpool.router.logic.ledger import Ticket

ONE = Endpoint("u/0", "decode", "a", 8000, pod="one", events=5557, replay=5577)
TWO = Endpoint("v/0", "decode", "b", 8000, pod="two", events=5557, replay=5577, ranks=2)


def test_only_endpoints_with_several_ranks_have_seats() -> None:
    seats = seats_of([ONE, TWO])
    assert [(seat.id, seat.rank, seat.seat) for seat in seats["v/0"]] == [("v/0", 0, "v/0#0"), ("v/0", 1, "v/0#1")]
    assert list(seats) == ["v/0"]
    assert names_of({"u/0": ONE, "v/0": TWO}, seats) == {"u/0", "v/0", "v/0#0", "v/0#1"}
    assert endpoint_of("v/0#1") == endpoint_of("v/0") == "v/0"


def test_each_rank_publishes_at_its_pod_on_its_own_ports() -> None:
    (alone,) = publishers(ONE)
    assert (alone.name, alone.host, alone.events, alone.replay) == ("u/0", "a", 5557, 5577)
    found = [(each.name, each.host, each.events, each.replay) for each in publishers(TWO)]
    assert found == [("v/0#0", "b", 5557, 5577), ("v/0#1", "b", 5558, 5578)]
    spread = publishers(dataclasses.replace(TWO, rank_hosts=("b", "c"), replay=0))
    assert [(each.host, each.events, each.replay) for each in spread] == [("b", 5557, 0), ("c", 5558, 0)]
    missing = publishers(dataclasses.replace(TWO, rank_hosts=("", "c")))
    assert [(each.rank, each.host) for each in missing] == [(1, "c")]
    assert publishers(dataclasses.replace(TWO, events=0)) == []


def test_what_the_engine_placed_is_taken_to_be_spread_evenly() -> None:
    ledger, (first, second) = Ledger(), seats_of([TWO])["v/0"]
    assert load_at(ledger, TWO) == load_at(ledger, first) == Load()
    for _ in range(3):
        ledger.admit("v/0", 100, 1.0)
    named = ledger.admit_at(first.seat, "v/0", 40, 2.0)
    assert load_at(ledger, TWO) == Load(170, 2, 2_500_000), "of two ranks with four requests one has two"
    assert load_at(ledger, first) == Load(190, 2, 3_500_000)
    assert load_at(ledger, second) == Load(150, 1, 1_500_000)
    ledger.prefilled(named)
    assert load_at(ledger, first).prefill == 1_500_000
    ledger.close(named)
    ledger.close(named)
    assert load_at(ledger, first) == load_at(ledger, second) == Load(150, 1, 1_500_000)
    assert dict(ledger.items()) == {"v/0": Load(300, 3, 3_000_000)}
    assert shared(ledger, ONE) == Load()


def test_what_others_sent_to_a_rank_counts() -> None:
    ledger = Ledger()
    ledger.elsewhere({"v/0": Load(100, 4, 0), "v/0#1": Load(100, 4, 0)}, 0)
    assert [load.requests for load in loads(ledger, TWO)] == [0, 4]


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 50), st.booleans()), max_size=30), st.integers(0, 2))
def test_ranks_together_have_what_their_endpoint_has(entries: list[tuple[int, int, bool]], unheard: int) -> None:
    ledger, worker = Ledger(unheard), dataclasses.replace(TWO, ranks=4)
    tickets: list[Ticket] = []
    for rank, tokens, closed in entries:
        seat = "" if rank < 0 else seat_name("v/0", rank)
        ticket = ledger.admit_at(seat, "v/0", tokens, tokens / 3) if seat else ledger.admit("v/0", tokens, tokens / 3)
        if closed:
            ledger.close(ticket)
        else:
            tickets.append(ticket)
    whole, each = ledger.seen("v/0"), loads(ledger, worker)
    assert all(load.tokens >= 0 and load.requests >= 0 and load.prefill >= 0 for load in each)
    for got, total in (
        (sum(load.tokens for load in each), whole.tokens),
        (sum(load.requests for load in each), whole.requests),
        (sum(load.prefill for load in each), whole.prefill),
    ):
        assert total - 4 < got <= total, "but for what rounding down leaves out"
    for ticket in tickets:
        ledger.close(ticket)
    assert ledger.items() == []
