"""Asking pods: only while something waits, never in a reconciliation's way, and whatever they answer."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from twinpool.core import protocol
from twinpool.operator.logic.books import Entry, Report
from twinpool.operator.logic.interconnect import Preflight
from twinpool.operator.logic.loading import Weights
from twinpool.operator.logic.observed import PodView
from twinpool.operator.logic.restarts import Life
from twinpool.operator.shell import questions as shell
from twinpool.operator.shell.questions import EngineLives, Preflights, RouterBooks, WeightLoads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

KEY = ("team", "demo")


class FakeRouter:
    """Answers what it is told to."""

    def __init__(self) -> None:
        self.answer: Any = {"synced": True, "current": True, "endpoints": []}
        self.status = 200
        self.asked = 0
        self.release: asyncio.Event | None = None

    async def page(self, _: web.Request) -> web.Response:
        self.asked += 1
        if self.release is not None:
            await self.release.wait()
        text = self.answer if isinstance(self.answer, str) else json.dumps(self.answer)
        return web.Response(text=text, status=self.status)


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeRouter]:
    made = FakeRouter()
    application = web.Application()
    application.router.add_get("/admin/endpoints", made.page)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(protocol, "ROUTER_ADMIN_PORT", runner.addresses[0][1])
    monkeypatch.setattr(shell, "QUICK", 0.01)
    monkeypatch.setattr(shell, "SLOW", 0.02)
    yield made
    await runner.cleanup()


@pytest.fixture
async def books() -> AsyncIterator[tuple[RouterBooks, asyncio.Queue[Any]]]:
    changes: asyncio.Queue[Any] = asyncio.Queue()
    made = RouterBooks(changes.put_nowait)
    yield made, changes
    await made.close()


async def test_launchers_are_asked_for_their_engines_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.json_response({"restarts": 2, "epoch": 3})

    application = web.Application()
    application.router.add_get("/status", page)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(protocol, "LAUNCHER_PORT", runner.addresses[0][1])
    changes: asyncio.Queue[Any] = asyncio.Queue()
    lives = EngineLives(changes.put_nowait)
    lives.follow(KEY, [PodView("g-0", "decode", uid="u", address="127.0.0.1")])
    await asyncio.wait_for(changes.get(), 10)
    assert lives.answers(KEY) == {"u": Life(epoch=3, restarts=2)}
    await lives.close()
    await runner.cleanup()


async def test_launchers_are_asked_what_their_preflights_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: asyncio.Queue[Any] = asyncio.Queue()
    answers = [(404, {"outcome": ""}), (200, {"outcome": "skipped", "problem": "no torch", "links": []})]

    async def page(_: web.Request) -> web.Response:
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        return web.Response(text=json.dumps(body), status=status)

    application = web.Application()
    application.router.add_get("/preflight", page)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(protocol, "LAUNCHER_PORT", runner.addresses[0][1])
    monkeypatch.setattr(shell, "QUICK", 0.01)
    preflights = Preflights(changes.put_nowait)
    preflights.follow(KEY, [PodView("g-0", "decode", uid="u", address="127.0.0.1")])
    await until(lambda: (preflights.answers(KEY) or {}).get("u") == Preflight("skipped", "no torch"))
    await preflights.close()
    await runner.cleanup()


async def test_weights_are_news_in_steps() -> None:
    changes: asyncio.Queue[Any] = asyncio.Queue()
    loads = WeightLoads(changes.put_nowait)
    status = {"weights": {"stage": "downloading", "bytes": 10, "total": 1000}}
    assert loads.read(status) == Weights("downloading", 10, 1000)
    assert loads.gist(Weights("downloading", 10, 1000)) == loads.gist(Weights("downloading", 11, 1000))
    assert (loads.path, loads.port()) == ("/status", protocol.LAUNCHER_PORT)
    await loads.close()


def pod(name: str = "r", address: str = "127.0.0.1") -> PodView:
    return PodView(name, "router", address=address)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)


async def test_answers_wake_the_pool_when_they_change(router: FakeRouter, books: Any) -> None:
    made, changes = books
    assert made.answers(KEY) is None
    made.follow(KEY, [pod()])
    assert await asyncio.wait_for(changes.get(), 10) == KEY
    assert made.answers(KEY) == {"r": Report()}
    before = router.asked
    await until(lambda: router.asked > before + 2)
    assert changes.empty(), "the same answer is no news"
    router.answer["endpoints"].append({"uid": "u", "admitted": True, "inFlight": 3})
    await asyncio.wait_for(changes.get(), 10)
    assert made.answers(KEY) == {"r": Report({"u": Entry(admitted=True, in_flight=3)})}


async def test_when_nothing_waits_nobody_is_asked_and_nothing_remembered(router: FakeRouter, books: Any) -> None:
    made, changes = books
    made.follow(KEY, [pod()])
    await asyncio.wait_for(changes.get(), 10)
    made.follow(KEY, [])
    assert made.answers(KEY) is None
    await asyncio.sleep(0.05)
    before = router.asked
    await asyncio.sleep(0.1)
    assert router.asked == before
    made.forget(KEY)


async def test_a_router_that_does_not_answer_is_none_and_holds_up_no_other(
    router: FakeRouter, books: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, changes = books
    made.follow(KEY, [pod(), pod("s", "127.0.0.77"), pod("t", "not an address"), pod("v6", "::1")])
    await asyncio.wait_for(changes.get(), 20)
    assert made.answers(KEY) == {"r": Report(), "s": None, "t": None, "v6": None}
    monkeypatch.setattr(shell, "TIMEOUT", 0.1)
    router.release = asyncio.Event()
    await asyncio.wait_for(changes.get(), 10)
    assert made.answers(KEY)["r"] is None
    router.release.set()


@pytest.mark.parametrize("answer", ["no json", "[]", '{"endpoints": 7}', "x" * 10])
async def test_an_answer_that_is_none_counts_as_none(
    router: FakeRouter, books: Any, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "MAX_ANSWER", 20)
    router.answer = answer if answer[0] != "x" else json.dumps({"endpoints": [], "pad": "x" * 30})
    made, changes = books
    made.follow(KEY, [pod()])
    await asyncio.wait_for(changes.get(), 10)
    assert made.answers(KEY) == {"r": None}


async def test_an_error_status_counts_as_no_answer(router: FakeRouter, books: Any) -> None:
    router.status = 404
    made, changes = books
    made.follow(KEY, [pod()])
    await asyncio.wait_for(changes.get(), 10)
    assert made.answers(KEY) == {"r": None}
