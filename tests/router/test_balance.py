"""Hot data processes give connections up, and nobody else does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.router.logic.balance import to_shed


@pytest.mark.parametrize(
    ("cpu", "clients", "shed"),
    [
        ([0.9], [100], [0]),
        ([0.9, 0.3], [100, 20], [5, 0]),
        ([0.9, 0.3], [10, 1], [1, 0]),
        ([0.9, 0.3], [1, 1], [0, 0]),
        ([0.9, 0.8], [100, 90], [0, 0]),
        ([0.3, 0.0], [100, 0], [0, 0]),
        ([0.9, 0.9, 0.1], [40, 40, 1], [2, 2, 0]),
    ],
)
def test_who_sheds(cpu: list[float], clients: list[int], shed: list[int]) -> None:
    assert to_shed(cpu, clients) == shed


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 1000)), min_size=1, max_size=8))
def test_somebody_always_keeps_all(processes: list[tuple[float, int]]) -> None:
    shed = to_shed([cpu for cpu, _ in processes], [clients for _, clients in processes])
    assert 0 in shed, "the coolest one"
    assert all(count == 0 or count < clients for count, (_, clients) in zip(shed, processes, strict=True))


async def test_a_shed_connection_gets_its_answer_first(router, kit):
    client = await router.connect()
    client.send(kit.post(kit.STREAM))
    assert "connection" not in (await client.answer()).headers
    router.pool.shed = 1
    client.send(kit.post(kit.STREAM))
    answer = await client.answer()
    assert (answer.status, answer.body, answer.headers["connection"]) == (200, b"".join(kit.EVENTS), "close")
    assert await client.rest() == b""
    other = await router.connect()
    other.send(kit.post(kit.STREAM))
    assert "connection" not in (await other.answer()).headers
