"""The legs to a rank: the header that names it on both hops, the books of it, and a retry that names none."""

from __future__ import annotations

import dataclasses

import pytest

from twinpool.router.logic.copies import Others
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.index_exact import Held
from twinpool.router.logic.ledger import Load

IDS = list(range(1000, 3010))
HEADER = "x-data-parallel-rank"


class Located:
    """In place of the control process: every prompt is held by these seats."""

    def __init__(self, loop, *seats):
        self.loop = loop
        self.seats = seats
        self.told = []

    def ask(self, names, listener):
        self.loop.call_soon(listener, {seat: Held(*[len(names)] * 3) for seat in self.seats})
        return 1

    def sent(self, endpoint, names, wait=0.0):
        self.told.append(endpoint)

    def forget(self, number):
        pass


@pytest.fixture
async def ranked(make_router, kit):
    """A router over two prefill and two decode workers of two ranks each; one rank of each role holds every prompt."""
    router = await make_router(policy="price")
    for role in ("prefill", "prefill", "decode", "decode"):
        await router.engine(role)
    two = [dataclasses.replace(engine.endpoint(), ranks=2) for engine in router.engines]
    router.pool.update(two)
    router.pool.locator = Located(router.loop, "prefill-0#1", "decode-1#0")
    router.pool.chooser.exact.rely(16, {f"{each.id}#{rank}" for each in two for rank in range(2)})
    return router


def ask(kit, **fields):
    return kit.post({"model": "m", "prompt": IDS, "max_tokens": 5, **fields}, headers="X-data-parallel-rank: 7\r\n")


async def test_both_legs_name_the_rank_that_holds_the_prompt(ranked, kit):
    assert (await ranked.ask(ask(kit))).status == 200
    prefill, _, other, decode = ranked.engines
    assert [seen.headers[HEADER] for seen in prefill.requests] == ["1"]
    assert [seen.headers[HEADER] for seen in decode.requests] == ["0"]
    assert not other.requests
    assert ranked.pool.locator.told == ["prefill-0#1", "decode-1#0"]
    assert ranked.value("rank_choices_total", "prefill", "router") == 1


async def test_what_runs_at_a_rank_is_in_its_books(ranked, kit):
    prefill = ranked.engines[0]
    prefill.script = kit.hang
    client = await ranked.connect()
    client.send(ask(kit))
    await kit.until(lambda: prefill.requests)
    books = dict(ranked.pool.ledger.items())
    assert books["prefill-0#1"] == books["prefill-0"]
    assert books["prefill-0"].requests == 1
    client.abort()
    await ranked.idle()


async def test_what_others_have_at_a_rank_is_known(ranked):
    ranked.pool.others(Others({"decode-1": (10, 2, 0), "decode-1#0": (10, 2, 0), "gone#0": (1, 1, 0)}))
    assert ranked.pool.ledger.seen("decode-1#0") == Load(10, 2)
    assert ranked.pool.ledger.seen("gone#0") == Load()
    assert set(ranked.pool._elsewhere.loads) == {"decode-1"}, "what a rank has is in its worker's books already"


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_retry_names_no_rank(ranked, kit, role):
    failed = []

    async def fail_once(engine, seen):
        if failed:
            await kit.answer_normally(engine, seen)
        else:
            failed.append(seen)
            await kit.reset(engine, seen)

    for engine in ranked.engines:
        if engine.role == role:
            engine.script = fail_once
    # Every worker of both roles has a rank that holds the prompt, so only the rule keeps the retry from naming one.
    ranked.pool.locator.seats = tuple(f"{each.name}#1" for each in ranked.engines)
    assert (await ranked.ask(ask(kit))).status == 200
    legs = [seen for engine in ranked.engines if engine.role == role for seen in engine.requests]
    assert failed[0].headers[HEADER] == "1"
    assert [seen.headers.get(HEADER) for seen in legs if seen is not failed[0]] == [None]
    assert ranked.value("rank_choices_total", role, "engine") == 1
    assert all("#" in told for told in ranked.pool.locator.told), "which rank takes it is not known"


async def test_a_worker_that_is_full_is_not_asked_again_when_it_is_the_only_one(make_router, kit):
    router = await make_router(policy="price", disaggregated=False)
    engine = await router.engine("decode", kit.always(kit.response(b"{}", "503 Service Unavailable")))
    router.pool.update([dataclasses.replace(engine.endpoint(), ranks=2)])
    router.pool.locator = Located(router.loop, "decode-0#1")
    router.pool.chooser.exact.rely(16, {"decode-0#0", "decode-0#1"})
    assert (await router.ask(ask(kit))).status == 503
    assert [seen.headers[HEADER] for seen in engine.requests] == ["1"]


async def test_workers_of_one_rank_get_no_header(router, kit):
    assert (await router.ask(ask(kit))).status == 200
    assert not any(HEADER in seen.headers for engine in router.engines for seen in engine.requests)
    assert router.pool.chooser.ranks.seats == {}
    assert isinstance(router.pool.directory.decode[0], Endpoint)
    assert not router.value("rank_choices_total", "decode", "engine")
