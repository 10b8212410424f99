"""Drives the pure engine in real time: steps, pulls, leases, KV events; gives every order a stream of its events."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from twinpool.worker.engines.simulated.logic.sequence import (
    Discard,
    Event,
    Failed,
    Fetch,
    FinishReason,
    Order,
    Pull,
    Token,
)
from twinpool.worker.engines.simulated.shell.transfer import Puller, PullFailed

if TYPE_CHECKING:
    from twinpool.worker.engines.simulated.flags import Settings
    from twinpool.worker.engines.simulated.logic.engine import Engine
    from twinpool.worker.engines.simulated.shell.publisher import Publisher

Listener = Callable[[Token | Failed], None]

#: A step may start this many seconds in the past, to make up for timers that fire late.
_CATCH_UP = 0.02
#: How often the leases of KV that waits to be pulled are extended, as a share of the lease (vLLM's heartbeat).
_HEARTBEAT = 1 / 6


class Driver:
    """Owns the engine while it runs. Every method must be called on the event loop."""

    def __init__(self, engine: Engine, settings: Settings, puller: Puller, publisher: Publisher | None) -> None:
        self.engine = engine
        self._settings = settings
        self._puller = puller
        self._publisher = publisher
        self._listeners: dict[str, Listener] = {}
        self._pulls: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stalled = False

    def submit(self, order: Order, listener: Listener) -> None:
        """Start an order; ``listener`` hears of its tokens and its failure, and of nothing after its end."""
        self._listeners[order.id] = listener
        self.engine.submit(order, asyncio.get_running_loop().time())
        self._idle.clear()
        self.wake()

    def abort(self, order_id: str, reason: FinishReason = "abort") -> None:
        """End an order; its listener hears nothing more."""
        self._listeners.pop(order_id, None)
        pull = self._pulls.pop(order_id, None)
        if pull is not None:
            pull.cancel()
        self._dispatch(self.engine.abort(order_id, reason))
        self.wake()

    def stall(self) -> None:
        """Make no step any more: what runs stays, and no counter moves."""
        self._stalled = True

    def wake(self) -> None:
        """Look again at what there is to do: something from outside changed the engine."""
        self._changed.set()

    async def idle(self) -> None:
        """Wait until no order is unfinished."""
        await self._idle.wait()

    async def run(self) -> None:
        """Step until cancelled."""
        heart = asyncio.create_task(self._heartbeat())
        try:
            await self._steps()
        finally:
            heart.cancel()
            for pull in self._pulls.values():
                pull.cancel()

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        while not self._stalled:
            now = loop.time()
            self.engine.expire(now)
            self._changed.clear()
            step, events = self.engine.begin(now)
            self._dispatch(events)
            if step is None:
                self._publish()
                await self._sleep_until_change()
                started = loop.time()
                continue
            started = max(started, now - _CATCH_UP) + step.seconds * self._settings.time_scale
            await asyncio.sleep(max(0.0, started - loop.time()))
            self._dispatch(self.engine.end(loop.time()))
            self._publish()

        await asyncio.Event().wait()

    async def _sleep_until_change(self) -> None:
        expiry = self.engine.leases.next_expiry()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(expiry):
                await self._changed.wait()

    def _publish(self) -> None:
        events = self.engine.blocks.drained()
        if events and self._publisher is not None:
            self._publisher.publish(events, time.time())
        for line in self.engine.log:
            print(f"INFO [simulated] {line}", file=sys.stderr, flush=True)
        self.engine.log.clear()
        if not self.engine.unfinished:
            self._idle.set()

    def _dispatch(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Token() | Failed():
                    ended = isinstance(event, Failed) or event.finish is not None
                    listener = self._listeners.pop(event.id, None) if ended else self._listeners.get(event.id)
                    if listener is not None:
                        listener(event)
                case Pull():
                    self._pulls[event.id] = asyncio.create_task(self._pull(event))
                case Fetch():
                    self._pulls[event.id] = asyncio.create_task(self._fetch(event))
                case Discard():
                    self._puller.notify(event.remote, "discard")

    async def _pull(self, pull: Pull) -> None:
        try:
            content, seconds = await self._puller.pull(pull.id, pull.remote, pull.missing)
        except PullFailed as problem:
            self._dispatch(self.engine.pull_failed(pull.id, str(problem)))
        else:
            self.engine.pulled(pull.id, content, seconds)
        self._pulls.pop(pull.id, None)
        self.wake()

    async def _fetch(self, fetch: Fetch) -> None:
        await asyncio.sleep(fetch.seconds * self._settings.time_scale)
        self.engine.loaded(fetch.id)
        self._pulls.pop(fetch.id, None)
        self.wake()

    async def _heartbeat(self) -> None:
        interval = max(0.05, self._settings.limits.lease_seconds * _HEARTBEAT)
        while True:
            await asyncio.sleep(interval)
            for remote in {sequence.remote for sequence in self.engine.awaiting_pull()} - {None}:
                assert remote is not None
                self._puller.notify(remote, "extend")
