"""One data-parallel rank of the simulated engine: an engine of its own with what drives it and what it talks over.

As in vLLM, ranks share nothing but the HTTP server: each has its own KV cache, side channel and event sockets, on the
first rank's ports plus its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import uuid
from typing import TYPE_CHECKING

from twinpool.core.errors import TwinpoolError
from twinpool.worker.engines.simulated.logic.engine import Engine
from twinpool.worker.engines.simulated.logic.tiers import Tiers
from twinpool.worker.engines.simulated.shell.driver import Driver
from twinpool.worker.engines.simulated.shell.publisher import Publisher
from twinpool.worker.engines.simulated.shell.transfer import Holder, Puller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from twinpool.worker.engines.simulated.flags import Settings

#: Connections that may wait to be accepted.
BACKLOG = 2048


class AddressRefused(TwinpoolError):
    """An address that the engine should listen on cannot be had."""


class Rank:
    """The engine of rank ``number``; :meth:`running` runs it. Needs a running event loop."""

    def __init__(self, settings: Settings, number: int) -> None:
        self.number = number
        size, pace = settings.limits.block_size, settings.pace
        tiers = Tiers(
            settings.tiers,
            settings.loading,
            prices=pace.prices,
            block_size=size,
            block_bytes=pace.transfer_bytes(1, size),
        )
        mixture = settings.mixture if not number or settings.mixture is None else settings.mixture.silent()
        self.engine = Engine(settings.limits, pace, settings.drafting, tiers, mixture)
        self.engine_id = str(uuid.uuid4())
        self.side_channel_port = settings.side_channel_port + number
        self._settings = settings
        self._puller = Puller(self.engine, settings.models[0], settings.handshake_timeout, settings.time_scale)
        events, lose = settings.events, settings.faults.lose_events
        self._publisher = None if events is None else Publisher(events, settings.host, size, lose, rank=number)
        self.driver = Driver(self.engine, settings, self._puller, self._publisher)

    @contextlib.asynccontextmanager
    async def running(self, on_end: Callable[[], None]) -> AsyncIterator[None]:
        """Run while the block runs; ``on_end`` is called when the engine itself ends, which only a bug makes it.

        Raises
        ------
        AddressRefused
            When the side channel's address cannot be had.
        """
        holder = None
        try:
            if self._settings.connector:
                holder = await self._hold()
            steps = asyncio.create_task(self.driver.run())
            steps.add_done_callback(lambda _: on_end())
            try:
                yield
            finally:
                steps.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await steps
                await self._puller.settled()
        finally:
            if holder is not None:
                holder.close()

    async def close(self) -> None:
        """Close the event sockets, which are open from the start."""
        if self._publisher is not None:
            await self._publisher.close()

    async def _hold(self) -> asyncio.Server:
        holder = Holder(self.engine, self.engine_id, self._settings.models[0], self.driver.wake)
        host, port = self._settings.host, self.side_channel_port
        with address(host, port):
            return await asyncio.start_server(holder.serve, host, port, backlog=BACKLOG)


@contextlib.contextmanager
def address(host: str, port: int) -> Iterator[None]:
    """Say which address cannot be had, and why."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressRefused(
                f"{host}:{port}: address already in use", "stop what listens there, or choose another port"
            ) from None
        raise AddressRefused(
            f"cannot listen on {host}:{port}: {error.strerror}", "choose an address of this machine"
        ) from None
