"""Policies through the data plane: who gets what, and books that are empty again."""

from __future__ import annotations

import pytest


async def fleet(make_router, **config):
    router = await make_router(**config)
    for role in ("prefill", "decode"):
        for _ in range(2):
            await router.engine(role)
    return router


@pytest.mark.parametrize("conditional", ["never", "auto"])
async def test_a_request_that_is_not_handed_off_is_served_whole_and_counted(make_router, kit, conditional):
    # Idle decode workers and a prompt of a word: a handoff could only cost.
    router = await fleet(make_router, conditional=conditional)
    answer = await router.ask(kit.post(kit.STREAM))
    assert answer.status == 200
    assert [len(engine.requests) for engine in router.engines[:2]] == [0, 0]
    assert router.value("handoffs_total", "local", conditional) == 1
    assert router.value("handoffs_total", "remote", "") == 0
    await router.idle()


async def test_equal_prompts_meet_at_one_worker_by_price(make_router, kit):
    router = await fleet(make_router, policy="price")
    request = kit.post({**kit.STREAM, "prompt": "the same words " * 500})
    for _ in range(6):
        assert (await router.ask(request)).status == 200
        await router.idle()
    assert sorted(len(engine.requests) for engine in router.engines[:2]) == [0, 6]
    assert router.pool.chooser.foresight.prefill.samples == 6
    assert router.pool.chooser.foresight.handoff.samples == 6
    ratios = router.pool.numbers.histograms["twinpool_router_ttft_prediction_ratio"]
    assert {by: sum(one.buckets) for by, one in ratios.items()} == {("remote",): 6}
    router.engines.clear()
    router.publish()
    assert not router.pool.chooser.index.trust


@pytest.mark.parametrize("header", [True, False])
async def test_short_prompts_of_a_session_meet_at_its_workers(make_router, kit, header):
    router = await fleet(make_router, policy="price")
    for number in range(6):
        body = {**kit.STREAM, "prompt": f"turn {number}"}
        if not header:
            body["prompt_cache_key"] = "mine"
        assert (await router.ask(kit.post(body, headers="X-Session-Id: mine\r\n" if header else ""))).status == 200
        await router.idle()
    assert sorted(len(engine.requests) for engine in router.engines[:2]) == [0, 6]
    assert sorted(len(engine.requests) for engine in router.engines[2:]) == [0, 6]


@pytest.mark.parametrize("policy", ["prefix", "price", "least-load", "random"])
async def test_the_books_are_empty_after_every_policy(make_router, kit, policy):
    router = await fleet(make_router, policy=policy, conditional="auto")
    for number in range(8):
        assert (await router.ask(kit.post({**kit.STREAM, "prompt": f"{number} " * 400}))).status == 200
    await router.idle()
