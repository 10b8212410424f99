"""Books of several processes: nobody's work counts twice, none is lost, and what is not heard of is supposed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from twinpool.core import protocol
from twinpool.router.logic.copies import (
    INTERVAL_SECONDS,
    STALE_SECONDS,
    Copies,
    Copy,
    Others,
    by_endpoint,
    copy_of_pod,
    loads_of,
    read_books,
    shared_name,
    write_books,
)
from twinpool.router.logic.ledger import Ledger, Load, Ticket
from twinpool.router.shell import copies as shell
from twinpool.router.shell.admin import AdminServer

WORKERS = ("a/0", "b/0", "c/1")
ROUTERS = 3
PROCESSES = 2


class Fleet(RuleBasedStateMachine):
    """Three routers of two processes that admit, finish, crash, are cut off and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.ledgers = [[Ledger() for _ in range(PROCESSES)] for _ in range(ROUTERS)]
        self.tickets: list[tuple[int, int, Ticket]] = []
        self.cut: set[int] = set()
        self.copies = [Copies(f"router {n}", PROCESSES) for n in range(ROUTERS)]
        for one in self.copies:
            one.watch(Copy(f"uid-{n}", "h", 1) for n in range(ROUTERS))
        self.look()
        self.look()

    @rule(router=st.integers(0, ROUTERS - 1), process=st.integers(0, PROCESSES - 1),
          worker=st.sampled_from(WORKERS), tokens=st.integers(0, 10**6), seconds=st.floats(0, 100))  # fmt: skip
    def admit(self, router: int, process: int, worker: str, tokens: int, seconds: float) -> None:
        ticket = self.ledgers[router][process].admit(worker, tokens, seconds)
        self.tickets.append((router, process, ticket))

    @rule(which=st.integers(0, 10**6), how=st.sampled_from(["prefilled", "close", "close again"]))
    def go_on(self, which: int, how: str) -> None:
        if self.tickets:
            router, process, ticket = self.tickets[which % len(self.tickets)]
            ledger = self.ledgers[router][process]
            ledger.prefilled(ticket) if how == "prefilled" else ledger.close(ticket)

    @rule(router=st.integers(0, ROUTERS - 1), process=st.integers(0, PROCESSES - 1))
    def crash(self, router: int, process: int) -> None:
        """A data process dies with its requests."""
        self.ledgers[router][process] = Ledger()
        self.tickets = [t for t in self.tickets if t[:2] != (router, process)]

    @rule(router=st.integers(0, ROUTERS - 1))
    def cut_off(self, router: int) -> None:
        self.cut ^= {router}

    @rule(seconds=st.sampled_from([INTERVAL_SECONDS, STALE_SECONDS / 2, STALE_SECONDS]))
    def look(self, seconds: float = INTERVAL_SECONDS) -> None:
        """Everybody asks everybody who can be reached."""
        self.now += seconds
        for number, one in enumerate(self.copies):
            for other in one.asked():
                asked = int(other.name.removeprefix("uid-"))
                if asked == number or not {asked, number} & self.cut:
                    loads = loads_of(entry for ledger in self.ledgers[asked] for entry in ledger.items())
                    books = read_books(write_books(f"router {asked}", PROCESSES, loads))
                    assert books is not None
                    one.heard(other.name, books, self.now)
        for number, one in enumerate(self.copies):
            own = [loads_of(ledger.items()) for ledger in self.ledgers[number]]
            for ledger, others in zip(self.ledgers[number], one.others(own, self.now), strict=True):
                ledger.elsewhere(by_endpoint(others.loads, WORKERS), others.unheard)

    @rule()
    def all_is_heard(self) -> None:
        """When everybody was heard just now, every process sees exactly what there is."""
        if self.cut:
            return
        self.look()
        for worker in WORKERS:
            every = [ledger[worker] for router in self.ledgers for ledger in router]
            for ledger in (ledger for router in self.ledgers for ledger in router):
                seen = ledger.seen(worker)
                assert seen.tokens == sum(load.tokens for load in every)
                assert seen.requests == sum(load.requests for load in every)
                assert seen.prefill == sum(load.prefill for load in every)

    @rule()
    def nothing_runs(self) -> None:
        """When all has ended, nobody sees anything, also of those who were cut off for long enough."""
        for router, process, ticket in self.tickets:
            self.ledgers[router][process].close(ticket)
        self.tickets = []
        self.look()
        self.look(STALE_SECONDS)
        for ledger in (ledger for router in self.ledgers for ledger in router):
            assert all(ledger.seen(worker) == Load() for worker in WORKERS)

    @invariant()
    def what_is_seen_is_possible(self) -> None:
        for router in self.ledgers:
            for ledger in router:
                for worker in WORKERS:
                    own, seen = ledger[worker], ledger.seen(worker)
                    assert seen.tokens >= own.tokens >= 0
                    assert seen.requests >= own.requests >= 0
                    assert seen.prefill >= own.prefill >= 0


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_copy_that_cannot_be_heard_is_taken_to_have_as_much_while_it_serves() -> None:
    copies = Copies("me", 2)
    copies.watch([Copy("mine", "h", 1), Copy("theirs", "h", 2), Copy("starts", "h", 3, serves=False)])
    copies.heard("mine", _books("me", 2), 10.0)
    copies.heard("theirs", _books("they", 3, a=(5, 1, 7)), 10.0)
    own = [{"a": (1, 1, 1)}, {"b": (2, 1, 0)}]
    first, second = copies.others(own, 10.5)
    assert (first.loads, first.unheard) == ({"a": (5, 1, 7), "b": (2, 1, 0)}, 0)
    assert first.processes == 1 + 3
    assert (second.loads, second.unheard) == ({"a": (6, 2, 8)}, 0)
    assert [copy.name for copy in copies.asked()] == ["theirs", "starts"]
    # Its three processes are supposed to be as busy as each of ours; one that does not serve yet is not.
    first, _ = copies.others(own, 10.0 + STALE_SECONDS)
    assert (first.loads, first.unheard, first.processes) == ({"b": (2, 1, 0)}, 3, 1 + 3)
    ledger = Ledger()
    ledger.admit("a", 10, 1.0)
    ledger.elsewhere(by_endpoint(first.loads, ["a", "b"]), first.unheard)
    assert (ledger.seen("a").tokens, ledger.seen("b").tokens) == (40, 2)
    # Gone for good, as Kubernetes has it.
    copies.watch([Copy("mine", "h", 1)])
    assert copies.others(own, 20.0)[0].unheard == 0


def _books(router: str, processes: int, **loads: tuple[int, int, int]) -> Any:
    return read_books(write_books(router, processes, loads))


def test_one_that_was_never_heard_counts_like_this_one() -> None:
    copies = Copies("me", 2)
    copies.watch([Copy("theirs", "h", 2)])
    assert copies.others([{}, {}], 1e9)[0].unheard == 2
    assert copies.state(1e9) == [{"address": "h:2", "serves": True, "heard": False, "requests": None}]
    copies.heard("theirs", _books("they", 1, a=(5, 1, 7)), 1e9)
    assert copies.state(1e9)[0]["requests"] == 1
    copies.heard("theirs", _books("they", 1, **{"a": (5, 2, 7), "a#1": (5, 1, 7)}), 1e9)
    assert copies.state(1e9)[0]["requests"] == 2, "one of the two was sent to a rank by name"
    copies.heard("nobody", _books("x", 1), 1e9)
    assert len(copies.state(1e9)) == 1


def test_who_is_asked_how_often() -> None:
    copies = Copies("me", 1)
    assert copies.alone
    assert not Copies("me", 2).alone
    assert copies.interval == INTERVAL_SECONDS
    copies.watch(Copy(str(n), "h", n) for n in range(64))
    assert 64 / copies.interval <= 40
    assert not copies.alone


def test_an_engine_has_one_name_whatever_a_router_thinks_of_it() -> None:
    assert shared_name("uid/0+2") == shared_name("uid/0") == "uid/0"
    assert shared_name("uid/0+2#1") == shared_name("uid/0#1") == "uid/0#1", "ranks of it stay apart"
    together = loads_of([("uid/0+1", Load(1, 1, 1)), ("uid/0", Load(2, 2, 2))])
    assert together == {"uid/0": (3, 3, 3)}
    assert by_endpoint(together, ["uid/0+7", "other/0"]) == {"uid/0+7": Load(3, 3, 3)}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"router":"r","processes":0,"loads":{}}',
        b'{"router":"r","processes":100000,"loads":{}}',
        b'{"router":"r","processes":1,"loads":{"a":[-1,0,0]}}',
        b'{"router":"r","processes":1,"loads":{"a":[1e99,0,0]}}',
        b'{"router":"r","processes":1,"loads":{"a":[1,2]}}',
    ],
)
def test_books_that_nobody_would_write_are_not_read(body: bytes) -> None:
    assert read_books(body) is None


@given(st.dictionaries(st.text(), st.tuples(*[st.integers(0, 2**53)] * 3)))
def test_books_are_read_as_they_were_written(loads: Any) -> None:
    books = read_books(write_books("r", 3, loads))
    assert books is not None
    assert (books.router, books.processes, books.loads) == ("r", 3, loads)


def test_which_pods_are_routers() -> None:
    pod: dict[str, Any] = {
        "metadata": {"uid": "u", "labels": {protocol.LABEL_ROLE: "router"}},
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    assert copy_of_pod(pod, 8081) == Copy("u", "10.0.0.1", 8081)
    going = {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "now"}}
    assert copy_of_pod(going, 8081) == Copy("u", "10.0.0.1", 8081, serves=False)
    starting = {**pod, "status": {"podIP": "10.0.0.1"}}
    assert copy_of_pod(starting, 8081) == Copy("u", "10.0.0.1", 8081, serves=False)
    assert copy_of_pod({**pod, "status": {}}, 8081) is None
    assert copy_of_pod({**pod, "status": {"podIP": "10.0.0.1", "phase": "Failed"}}, 8081) is None
    assert copy_of_pod({"metadata": {"labels": {protocol.LABEL_ROLE: "decode"}}}, 8081) is None


async def test_who_does_not_tell_its_books_in_time_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "_TIMEOUT", 0.2)
    body = write_books("they", 1, {"a": (1, 2, 3)})

    async def page() -> tuple[int, str, bytes]:
        return status, "application/json", body

    over = asyncio.Event()

    async def silent(reader: Any, writer: Any) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()
        over.set()

    good = await AdminServer({shell.PATH: page}).start("127.0.0.1", 0)
    mute = await asyncio.start_server(silent, "127.0.0.1", 0)
    one, other = (Copy("n", "127.0.0.1", s.sockets[0].getsockname()[1]) for s in (good, mute))
    status = 200
    books = await shell.ask(one)
    assert books is not None
    assert books.loads == {"a": (1, 2, 3)}
    status = 500
    assert await shell.ask(one) is None
    assert await shell.ask(other) is None
    await over.wait()
    good.close()
    mute.close()
    assert await shell.ask(one) is None
    for _ in range(5):  # asyncio closes a transport's socket a turn later
        await asyncio.sleep(0)


async def test_a_data_process_forgets_others_that_it_does_not_hear_of(make_router: Any) -> None:
    router = await make_router()
    engine = await router.engine("decode")
    router.pool.others(Others({engine.name: (7, 1, 0), "nobody": (1, 1, 1)}, 0))
    assert router.pool.ledger.seen(engine.name).tokens == 7
    router.pool.expire()
    assert router.pool.ledger.seen(engine.name).tokens == 7
    router.pool._heard -= STALE_SECONDS
    router.pool.expire()
    assert router.pool.ledger.seen(engine.name).tokens == 0
