"""One leader at a time; a crash is noticed after the Lease's duration, a clean end at the next look."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from twinpool.operator.shell.cluster import ApiRefused
from twinpool.operator.shell.lease import Leadership

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


class LeaseServer:
    """One Lease with optimistic locking; refuses everything while ``down``."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.down = False
        self.hangs = False
        self.writes: list[str] = []

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.sleep(3600)
        if self.down:
            raise ApiRefused(0, "no answer")

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        await self._answer()
        if self.lease is None:
            raise ApiRefused(404, "not found")
        return copy.deepcopy(self.lease)

    async def create(self, kind: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        await self._answer()
        if self.lease is not None:
            raise ApiRefused(409, "exists")
        return self._store(body)

    async def replace(self, kind: str, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        await self._answer()
        assert self.lease is not None
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise ApiRefused(409, "conflict")
        return self._store(body)

    def _store(self, body: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        self.writes.append(body["spec"]["holderIdentity"])
        return self.lease


def contender(server: LeaseServer, identity: str) -> tuple[Leadership, asyncio.Task[None]]:
    leadership = Leadership(server, "ns", "lease", identity)
    return leadership, asyncio.create_task(leadership.run())


async def stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_first_one_leads_and_renews() -> None:
    server = LeaseServer()
    a, run_a = contender(server, "a")
    await asyncio.wait_for(a.held.wait(), 1)
    b, run_b = contender(server, "b")
    await asyncio.sleep(120)
    assert a.valid
    assert not b.held.is_set()
    assert not b.valid
    assert set(server.writes) == {"a"}
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 0
    await stop(run_a, run_b)


async def test_a_crash_is_noticed_after_the_duration(looptime: Any) -> None:
    server = LeaseServer()
    a, run_a = contender(server, "a")
    b, run_b = contender(server, "b")
    await asyncio.sleep(10)
    assert a.held.is_set()
    await stop(run_a)
    crashed = asyncio.get_running_loop().time()
    await asyncio.wait_for(b.held.wait(), 60)
    assert 13 <= asyncio.get_running_loop().time() - crashed <= 18
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1
    await stop(run_b)


async def test_a_clean_end_hands_over_at_once() -> None:
    server = LeaseServer()
    a, run_a = contender(server, "a")
    b, run_b = contender(server, "b")
    await asyncio.sleep(10)
    await stop(run_a)
    await a.release()
    await a.release()
    began = asyncio.get_running_loop().time()
    await asyncio.wait_for(b.held.wait(), 60)
    assert asyncio.get_running_loop().time() - began <= 2
    assert not a.valid
    await stop(run_b)


async def test_a_leader_without_the_server_stops_before_another_may_begin() -> None:
    server = LeaseServer()
    changes: list[bool] = []
    a = Leadership(server, "ns", "lease", "a", changed=changes.append)
    run_a = asyncio.create_task(a.run())
    await asyncio.sleep(5)
    server.down = True
    await asyncio.sleep(9)
    assert a.held.is_set(), "a short outage costs nothing"
    await asyncio.sleep(3)
    assert not a.valid
    assert not a.held.is_set()
    server.down = False
    await asyncio.sleep(3)
    assert a.valid
    assert changes == [True, False, True]
    await stop(run_a)


async def test_a_server_that_hangs_ends_the_leadership_too() -> None:
    server = LeaseServer()
    a, run_a = contender(server, "a")
    await asyncio.sleep(5)
    server.hangs = True
    await asyncio.sleep(11)
    assert not a.valid
    await asyncio.sleep(10)
    assert not a.held.is_set()
    await stop(run_a)


async def test_a_release_that_fails_is_no_error() -> None:
    server = LeaseServer()
    a, run_a = contender(server, "a")
    await asyncio.sleep(1)
    await stop(run_a)
    server.down = True
    await a.release()
    assert not a.held.is_set()


async def test_a_lease_that_another_took_is_not_released() -> None:
    server = LeaseServer()
    a, run_a = contender(server, "a")
    await asyncio.sleep(1)
    await stop(run_a)
    assert server.lease is not None
    server.lease["spec"]["holderIdentity"] = "b"
    await a.release()
    assert server.lease["spec"]["holderIdentity"] == "b"
