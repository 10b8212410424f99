"""More requests than places: who waits, who goes next, who is told to come back."""

from __future__ import annotations

import asyncio

from twinpool.router.logic.keys import Keyring, digest_of

KEYS = {name: name * 16 for name in "ab"}


async def pool_of(make_router, kit, decodes=1, **config):
    settings = {"queue_concurrency": 2, "queue_max": 3, "queue_timeout": 30.0, **config}
    router = await make_router(disaggregated=False, connector=None, **settings)
    for _ in range(decodes):
        await router.engine("decode", kit.hang)
    return router


async def send(router, kit, count=1, headers="", **fields):
    clients = []
    for _ in range(count):
        client = await router.connect()
        client.send(kit.post({**kit.STREAM, **fields}, headers=headers))
        clients.append(client)
    return clients


def release(router):
    for engine in router.engines:
        engine.release.set()


async def test_requests_wait_for_a_place_and_nobody_is_lost(make_router, kit):
    router = await pool_of(make_router, kit, queue_max=20)
    engine = router.engines[0]
    clients = await send(router, kit, 12)
    await kit.until(lambda: router.pool.admission.waiting == 10)
    assert (len(engine.requests), router.pool.admission.running) == (2, 2)
    release(router)
    for client in clients:
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, b"".join(kit.EVENTS))
    await router.idle()
    assert (router.pool.admission.waiting, router.pool.admission.running) == (0, 0)


async def test_a_full_queue_is_said_with_when_to_come_back(make_router, kit):
    router = await pool_of(make_router, kit)
    clients = await send(router, kit, 5)
    await kit.until(lambda: router.pool.admission.waiting == 3)
    (late,) = await send(router, kit)
    answer = await late.answer()
    assert (answer.status, answer.error["code"]) == (429, "queue_full")
    assert answer.error["type"] == "rate_limit_error"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert router.value("turned_away_total", "full") == 1
    release(router)
    assert [(await client.answer()).status for client in clients] == [200] * 5
    late.send(kit.post(kit.STREAM))
    assert (await late.answer()).status == 200, "the connection is still good"


async def test_overload_sheds_first_who_misses_the_objective(make_router, kit):
    router = await pool_of(make_router, kit, ttft=0.05)
    clients = await send(router, kit, 5)
    await kit.until(lambda: router.pool.admission.waiting == 3)
    await asyncio.sleep(0.1)
    (late,) = await send(router, kit)
    statuses = [asyncio.ensure_future(client.answer()) for client in clients]
    await kit.until(lambda: any(answer.done() for answer in statuses))
    (shed,) = (answer.result().status for answer in statuses if answer.done())
    assert shed == 429
    release(router)
    assert (await late.answer()).status == 200
    assert sorted([(await answer).status for answer in statuses]) == [200, 200, 200, 200, 429]


async def test_who_waits_too_long_is_told(make_router, kit):
    router = await pool_of(make_router, kit, queue_timeout=0.05)
    clients = await send(router, kit, 3)
    await kit.until(lambda: router.pool.admission.waiting == 1)

    def swept():
        router.pool.admission.sweep()
        return not router.pool.admission.waiting

    await kit.until(swept)
    answers = [asyncio.ensure_future(client.answer()) for client in clients]
    await kit.until(lambda: any(answer.done() for answer in answers))
    (late,) = (answer.result() for answer in answers if answer.done())
    assert (late.status, late.error["code"]) == (504, "queue_timeout")
    release(router)
    assert sorted([(await answer).status for answer in answers]) == [200, 200, 504]


async def test_a_client_that_leaves_the_queue_reaches_no_worker(make_router, kit):
    router = await pool_of(make_router, kit)
    clients = await send(router, kit, 2)
    await kit.until(lambda: len(router.engines[0].requests) == 2)
    gone = await send(router, kit, 2)
    await kit.until(lambda: router.pool.admission.waiting == 2)
    for client in gone:
        client.abort()
    await kit.until(lambda: not router.pool.admission.waiting)
    assert router.value("client_aborts_total", "queued") == 2
    release(router)
    assert [(await client.answer()).status for client in clients] == [200] * 2
    await router.idle()
    assert len(router.engines[0].requests) == 2


async def test_places_come_back_however_a_request_ends(make_router, kit):
    router = await pool_of(make_router, kit, queue_max=100)
    engine = router.engines[0]
    for script in (kit.reset, kit.always(kit.response(b"{}", "500 X")), kit.always(kit.SSE_HEAD, close=True)):
        engine.script = script
        for client in await send(router, kit, 5):
            await client.answer()
    engine.script = kit.hang
    for client in await send(router, kit, 6):
        await asyncio.sleep(0.01)
        client.abort()
    await router.idle()
    await kit.until(lambda: (router.pool.admission.running, router.pool.admission.waiting) == (0, 0))


async def test_another_worker_is_more_room(make_router, kit):
    router = await pool_of(make_router, kit)
    await send(router, kit, 4)
    await kit.until(lambda: router.pool.admission.waiting == 2)
    await router.engine("decode", kit.hang)
    await kit.until(lambda: not router.pool.admission.waiting)
    assert sum(len(engine.requests) for engine in router.engines) <= 4


async def test_when_nobody_serves_nobody_waits(make_router, kit):
    router = await pool_of(make_router, kit)
    clients = await send(router, kit, 4)
    await kit.until(lambda: router.pool.admission.waiting == 2)
    router.pool.update([engine.endpoint(admitted=False) for engine in router.engines])
    answers = [asyncio.ensure_future(client.answer()) for client in clients]
    await kit.until(lambda: sum(answer.done() for answer in answers) == 2)
    assert [answer.result().status for answer in answers if answer.done()] == [503, 503]
    release(router)
    assert sorted([(await answer).status for answer in answers]) == [200, 200, 503, 503]


async def test_requests_are_held_while_nobody_serves_where_the_pool_says_so(make_router, kit):
    router = await make_router(disaggregated=False, connector=None, queue_max=3, queue_hold=60.0, queue_timeout=30.0)
    admission = router.pool.admission
    clients = await send(router, kit, 3)
    await kit.until(lambda: admission.waiting == 3)
    assert admission.holding
    admission.sweep()
    assert admission.waiting == 3
    (late,) = await send(router, kit)
    assert (await late.answer()).error["code"] == "queue_full"
    await router.engine("decode")
    assert [(await client.answer()).status for client in clients] == [200] * 3
    await router.idle()
    assert not admission.holding


async def test_a_hold_ends_and_who_was_held_then_has_a_timeout_to_find_room(make_router, kit):
    router = await make_router(
        disaggregated=False, connector=None, queue_hold=0.05, queue_timeout=0.05, queue_concurrency=1
    )
    (client,) = await send(router, kit)
    await kit.until(lambda: router.pool.admission.waiting == 1)

    def swept():
        router.pool.admission.sweep()
        return not router.pool.admission.waiting

    await kit.until(swept)
    answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (503, "no_worker")
    assert "routing.queue.hold" in answer.error["message"]
    assert router.value("turned_away_total", "unserved") == 1
    clients = await send(router, kit, 2)
    await kit.until(lambda: router.pool.admission.waiting == 2)
    await asyncio.sleep(0.1)
    await router.engine("decode", kit.hang)
    await kit.until(lambda: router.pool.admission.waiting == 1)
    router.pool.admission.sweep()
    assert router.pool.admission.waiting == 1, "not at once"
    await kit.until(swept)
    release(router)
    assert sorted([(await client.answer()).status for client in clients]) == [200, 504]


async def test_urgent_requests_go_first_where_the_pool_says_so(make_router, kit):
    for priorities, first in ((True, "urgent"), (False, "patient")):
        router = await pool_of(make_router, kit, queue_concurrency=1, queue_priorities=priorities)
        await send(router, kit)
        await kit.until(lambda router=router: router.engines[0].requests)
        for prompt, priority in (("patient", 5), ("urgent", -99)):
            await send(router, kit, prompt=prompt, priority=priority)
            count = 1 if prompt == "patient" else 2
            await kit.until(lambda router=router, count=count: router.pool.admission.waiting == count)
        release(router)
        await kit.until(lambda router=router: len(router.engines[0].requests) == 3)
        assert router.engines[0].requests[1].json["prompt"] == first


async def test_keys_share_the_places(make_router, kit):
    router = await pool_of(make_router, kit, queue_concurrency=1, queue_max=100)
    router.pool.keyring = Keyring([(name, digest_of(key.encode(), name)) for name, key in KEYS.items()], b"s")
    header = "Authorization: Bearer {}\r\n"
    await send(router, kit, 13, header.format(KEYS["a"]), prompt="a")
    await kit.until(lambda: router.pool.admission.waiting == 12)
    await send(router, kit, 6, header.format(KEYS["b"]), prompt="b")
    await kit.until(lambda: router.pool.admission.waiting == 18)
    release(router)
    await kit.until(lambda: len(router.engines[0].requests) == 19)
    order = [request.json["prompt"] for request in router.engines[0].requests]
    assert order[1:13].count("b") == 6, "taken in turns"
    assert router.value("key_requests_total", "a") == 13
