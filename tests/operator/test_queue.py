"""The work queue keeps client-go's promises, in the loop's own time."""

from __future__ import annotations

import asyncio

import pytest

from twinpool.operator.shell.queue import WorkQueue

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


async def test_a_key_waits_only_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    queue.add("a")
    queue.add("b")
    assert len(queue) == 2
    assert [await queue.get(), await queue.get()] == ["a", "b"]


async def test_a_key_that_is_added_while_it_is_worked_on_comes_back_afterwards() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    key = await queue.get()
    queue.add("a")
    assert len(queue) == 0
    queue.done(key)
    assert await queue.get() == "a"
    queue.done("a")
    assert len(queue) == 0


async def test_get_waits_for_a_key() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waiting = [asyncio.create_task(queue.get()) for _ in range(2)]
    await asyncio.sleep(1)
    queue.add("a")
    queue.add("b")
    assert sorted(await asyncio.gather(*waiting)) == ["a", "b"]


async def test_delays(looptime: float) -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 10)
    queue.add_after("a", 20)
    assert await queue.get() == "a"
    assert looptime == 10
    queue.done("a")
    await asyncio.sleep(100)
    assert len(queue) == 0, "the later one was not kept beside the earlier one"


async def test_an_earlier_time_wins(looptime: float) -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 20)
    queue.add_after("a", 5)
    await queue.get()
    assert looptime == 5


async def test_adding_at_once_replaces_a_delay() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 5)
    queue.add("a")
    queue.add_after("a", 1)
    queue.done(await queue.get())
    await asyncio.sleep(100)
    assert len(queue) == 0


async def test_failures_back_off_up_to_a_cap_until_one_succeeds(looptime: float) -> None:
    queue: WorkQueue[str] = WorkQueue(first_delay=1.0, longest_delay=5.0)
    delays = []
    for _ in range(5):
        delays.append(queue.failed("a"))
        queue.done(await queue.get())
    assert delays == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert looptime == sum(delays)
    queue.succeeded("a")
    assert queue.failed("a") == 1.0


async def test_a_key_that_is_forgotten_does_not_come_back() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.failed("a")
    queue.forget("a")
    await asyncio.sleep(100)
    assert len(queue) == 0
    assert queue.failed("a") == 0.5
