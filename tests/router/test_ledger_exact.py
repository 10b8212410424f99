"""The ledger is what is running, at every moment and in every order of events, and nothing once nothing runs."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.core.protocol import RouterConfig
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.framing import Head
from twinpool.router.logic.headers import forward
from twinpool.router.logic.request import Route, read
from twinpool.router.settings import Limits
from twinpool.router.shell.call import Call
from twinpool.router.shell.exchange import Exchange
from twinpool.router.shell.pool import Pool

STREAM = Head(200, None, True, True, True, b"", True)
EVENT = b"9\r\ndata: {}\n\n\r\n".replace(b"9", b"a")
PARAMS = b'{"kv_transfer_params":{"do_remote_prefill":true}}'
ENDPOINTS = [Endpoint(f"{role}{n}", role, "h", n, admitted=True) for role in ("prefill", "decode") for n in range(2)]  # type: ignore[arg-type]


class Wire:
    """An open connection to an engine that answers when the test says so."""

    paused = False

    def __init__(self, wires: list[Wire]) -> None:
        self.leg: Any = None
        self._wires = wires

    def send(self, leg: Any, head: bytes, body: bytes) -> None:
        self.leg = leg
        self._wires.append(self)

    def abort(self) -> None:
        if self in self._wires:
            self._wires.remove(self)

    def done(self) -> Any:
        self._wires.remove(self)
        return self.leg


class Connections:
    """In place of the real ones; ``refuse`` makes the next connection fail."""

    def __init__(self) -> None:
        self.wires: list[Wire] = []

    def take(self, endpoint: Endpoint) -> Wire:
        return Wire(self.wires)

    def sweep(self, known: set[str]) -> None:
        pass


class Asker:
    """A client that counts its outcomes."""

    def __init__(self) -> None:
        self.outcomes = 0

    def begin(self, head: bytes, request_id: bytes | None) -> None:
        pass

    def write(self, data: bytes) -> None:
        pass

    def finish(self, *, close: bool) -> None:
        self.outcomes += 1

    def refuse(self, *_: Any) -> None:
        self.outcomes += 1

    def answer_error(self, *_: Any) -> None:
        self.outcomes += 1

    def break_off(self) -> None:
        self.outcomes += 1


class World:
    """Some requests at once over two prefill and two decode engines."""

    def __init__(self, loop: asyncio.AbstractEventLoop, policy: Any) -> None:
        config = RouterConfig("p", "n", ("m",), on_prefill_failure=policy)
        self.pool = Pool(loop, config, Limits(release_grace=0.0), Random(1))
        self.connections = Connections()
        self.pool.connections = self.connections  # type: ignore[assignment]
        self.pool.update(ENDPOINTS)
        self.running: list[tuple[Exchange, Asker]] = []
        self.gone: list[Asker] = []
        self.askers: list[Asker] = []

    def start(self, split: bool) -> None:
        body = b'{"prompt":"a","stream":true,"max_tokens":5%b}' % (b"" if split else b',"n":2')
        call = Call(Route.COMPLETIONS, b"/", forward([], b"id"), read(Route.COMPLETIONS, body), 0.0)
        asker = Asker()
        exchange = Exchange(self.pool, asker, call)
        self.running.append((exchange, asker))
        self.askers.append(asker)
        exchange.start()

    def leave(self, number: int) -> None:
        waiting = [pair for pair in self.running if not pair[1].outcomes and pair[1] not in self.gone]
        if waiting:
            exchange, asker = waiting[number % len(waiting)]
            self.gone.append(asker)
            exchange.client_gone()

    def answer(self, number: int, how: str) -> None:
        if not self.connections.wires:
            return
        wire = self.connections.wires[number % len(self.connections.wires)]
        leg = wire.leg
        prefill = leg.endpoint.role == "prefill"
        if how == "lost":
            wire.done().on_lost(None)
        elif how in ("500", "503", "400") and not getattr(leg, "answered", False):
            wire.done().on_head(Head(int(how), 0, False, False, True, b"", True))
            if not leg.closed:
                leg.on_body(b"")
            if not leg.closed:
                leg.on_end()
        elif prefill:
            body = PARAMS if how == "good" else b"{}"
            leg = wire.done()
            leg.on_head(Head(200, len(body), False, False, True, b"", True))
            leg.on_body(body)
            leg.on_end()
        elif not leg.answered:
            leg.on_head(STREAM)
            leg.on_body(EVENT)
        else:
            wire.done()
            leg.on_body(b"0\r\n\r\n")
            leg.on_end()

    def check(self) -> None:
        """Compare the books with the open connections."""
        legs: dict[str, int] = {}
        for wire in self.connections.wires:
            legs[wire.leg.endpoint.id] = legs.get(wire.leg.endpoint.id, 0) + 1
        books = dict(self.pool.ledger.items())
        assert {identity: load.requests for identity, load in books.items() if load.requests} == legs
        assert all(load.tokens >= load.requests for load in books.values())
        assert all(asker.outcomes <= 1 for asker in self.askers)
        assert all(not asker.outcomes for asker in self.gone)
        waiting = sum(1 for wire in self.connections.wires if getattr(wire.leg, "handed_off", False))
        assert sum(load.unpulled for load in books.values()) <= waiting


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["start", "start whole", "leave", "shrink", "good", "good", "good", "lost", "500", "503", "400"]
        ),
        st.integers(0, 50),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["retry-then-local", "local", "fail"]), steps)
def test_the_books_are_exact_whatever_happens(policy: Any, script: list[tuple[str, int]]) -> None:
    loop = asyncio.new_event_loop()
    try:
        world = World(loop, policy)
        for what, number in script:
            match what:
                case "start" | "start whole":
                    world.start(split=what == "start")
                case "leave":
                    world.leave(number)
                case "shrink":
                    world.pool.update([e for n, e in enumerate(ENDPOINTS) if number >> n & 1 or n % 2])
                case how:
                    world.answer(number, how)
            world.check()
        world.pool.update(ENDPOINTS)
        for _ in range(1000):
            if not world.connections.wires:
                break
            world.answer(0, "good")
            world.check()
        assert not world.connections.wires
        assert world.pool.ledger.items() == []
        assert all(asker.outcomes == 1 for asker in world.askers if asker not in world.gone)
    finally:
        loop.close()
