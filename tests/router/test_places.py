"""How much a process may have at the workers, and that the queue keeps the rest."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.protocol import RouterConfig
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.ledger import Load
from twinpool.router.logic.places import Elsewhere, Places, places

ALONE = Elsewhere({})


def config(**fields: object) -> RouterConfig:
    return RouterConfig("p", "n", ("m",), **{"ttft": 1.0, "sequences": 64, "conditional": "always", **fields})  # type: ignore[arg-type]


def workers(role: str, count: int) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(f"{role}{n}", role, "10.0.0.1", 8000) for n in range(count))


P, D = workers("prefill", 2), workers("decode", 3)


def test_an_engine_gets_what_it_runs_at_once_and_half_an_objective_of_prefill() -> None:
    assert places(config(), P, D, ALONE, 1) == Places(192, 1.0, 1.0)
    assert places(config(queue_concurrency=10), P, D, ALONE, 1) == Places(30, 1.0, 1.0), "what the pool says counts"
    assert places(config(sequences=0), P, D, ALONE, 1) == Places(3 * 8192, 1.0, 1.0)
    assert places(config(ttft=None), P, D, ALONE, 2) == Places(3 * 4096)
    assert places(config(), (), D, ALONE, 1) == Places(192, math.inf)
    assert places(config(), P, (), ALONE, 1) == Places(0)
    assert places(config(conditional="auto"), P, D, ALONE, 1) == Places(192, 2.0, 1.0), "decode workers compute prompts"
    both = tuple(dataclasses.replace(worker, ranks=2) for worker in P)
    assert places(config(), both, D, ALONE, 1) == Places(192, 2.0, 2.0), "each rank reads for itself"


def test_a_process_has_what_others_leave_and_its_equal_share_at_least() -> None:
    busy = Elsewhere({"decode0": Load(requests=50), "prefill1": Load(requests=10, prefill=200_000)}, 3)
    assert places(config(), P, D, busy, 1) == Places(132, 0.8, 0.8)
    assert places(config(), P, D, busy, 1, factor=2.0).prefill == pytest.approx(0.6)
    full = Elsewhere({"decode0": Load(requests=500), "prefill1": Load(prefill=9_000_000)}, 3)
    assert places(config(), P, D, full, 1) == Places(48, 0.25, 0.25)
    assert places(config(), P, D, busy._replace(unheard=1), 1) == Places(48, 0.25, 0.25), "nobody knows its"


@given(st.integers(1, 8), st.integers(0, 400), st.integers(1, 300))
def test_equal_processes_never_have_more_than_there_is_but_for_rounding(count: int, each: int, sequences: int) -> None:
    elsewhere = Elsewhere({"decode0": Load(requests=each * (count - 1))}, count - 1)
    own = places(config(sequences=sequences), P, D, elsewhere, 1).requests
    assert own >= 1
    # Who has less than its share may have more, who has that much may not.
    if each >= sequences * len(D) / count:
        assert own * count <= sequences * len(D) + count


async def test_a_prompt_waits_at_the_router_while_prefill_has_half_an_objective_to_do(make_router, kit):
    router = await make_router(policy="price", ttft=1.0, conditional="always")
    engine = await router.engine("prefill", kit.hang)
    await router.engine("decode")
    admission = router.pool.admission
    prompt = "word " * 20_000
    clients = []
    for _ in range(3):
        client = await router.connect()
        client.send(kit.post({**kit.STREAM, "messages": [{"role": "user", "content": prompt}]}))
        clients.append(client)
    await kit.until(lambda: admission.waiting == 2)
    assert (admission.running, len(engine.requests)) == (1, 1), "one prompt takes longer than that by itself"
    engine.release.set()
    assert [(await client.answer()).status for client in clients] == [200] * 3
    await router.idle()
    assert (admission.waiting, admission.running, admission._prefill) == (0, 0, 0.0)


async def test_decode_workers_without_a_place_left_compute_no_prompts(make_router, kit):
    router = await make_router(policy="price", ttft=1.0, conditional="auto", sequences=2)
    prefill = await router.engine("prefill", kit.hang)
    decode = await router.engine("decode", kit.hang)
    for number in range(2):
        client = await router.connect()
        client.send(kit.post(kit.STREAM))
        await kit.until(lambda: len(prefill.requests) + len(decode.requests) == number + 1)  # noqa: B023
    assert router.pool.admission.crowded
    assert (len(decode.requests), len(prefill.requests)) == (1, 1), "alone it is cheaper at the decode worker"
    for engine in router.engines:
        engine.release.set()
    await router.idle()
