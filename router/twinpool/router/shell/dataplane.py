"""A data process: accepts clients from the listener it inherits and serves them until it is drained.

Started as ``python -m twinpool.router.shell.dataplane LISTENER CHANNEL`` (two inherited file descriptors) by the
control process, and gone when that one is.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import time
from random import Random

import uvloop

from twinpool.router.logic.decisions import LOOK_SECONDS, Decisions
from twinpool.router.logic.keys import Keyring
from twinpool.router.logic.lag import Lag
from twinpool.router.shell import channel, routes
from twinpool.router.shell.client import ClientConnection
from twinpool.router.shell.debug import pool_state, process_state
from twinpool.router.shell.listening import BACKLOG
from twinpool.router.shell.pool import Pool
from twinpool.router.shell.secrets import Certificate
from twinpool.router.shell.tracing import Tracing

_REPORT_SECONDS = 1.0
_HANDSHAKE_SECONDS = 10.0


class DataProcess:
    """Clients, the pool, and the channel to the control process."""

    def __init__(
        self, pool: Pool, server: asyncio.Server, clients: set[ClientConnection], certificate: Certificate | None
    ) -> None:
        self.pool = pool
        self._certificate = certificate
        self._server = server
        self._clients = clients
        self._done = asyncio.Event()
        self._lag = Lag()
        #: When somebody looked at choices last.
        self._looked_at = 0.0

    def _looked(self, number: int, wanted: bool) -> channel.State:
        """Return what this process is at; choices that are ``wanted`` are kept from now on, for a while."""
        chooser, kept = self.pool.chooser, None
        if wanted:
            self._looked_at = self.pool.loop.time()
            kept = chooser.decisions.last() if chooser.decisions is not None else None
            chooser.decisions = chooser.decisions or Decisions(time.time)
        state = {"process": process_state(self._lag), **pool_state(self.pool, len(self._clients))}
        return channel.State(number, state, kept)

    def report(self, number: int = 0) -> channel.Report:
        """Return what was counted, with the gauges of this moment."""
        numbers = self.pool.numbers
        numbers.values["twinpool_router_clients"] = {(): float(len(self._clients))}
        numbers.values["twinpool_router_requests_waiting"] = {(): float(self.pool.admission.waiting)}
        held = self.pool.admission.waiting if self.pool.admission.holding else 0
        numbers.values["twinpool_router_requests_held"] = {(): float(held)}
        suspects = (self.pool.directory.known[endpoint] for endpoint in self.pool.suspects())
        numbers.values["twinpool_router_endpoint_suspect"] = {(e.pod, e.role): 1.0 for e in suspects}
        return channel.Report(
            number,
            numbers,
            self.pool.ledger.items(),
            warmth=self.pool.warmth.tokens(self.pool.clock()),
            clients=len(self._clients),
            cpu=time.process_time(),
            arrivals=self.pool.meter.arrivals,
            foresight=self.pool.chooser.foresight.state(),
            distrusts=self.pool.rendering is not None and self.pool.rendering.distrusts,
        )

    async def follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do what the control process says; without it, end."""
        draining: asyncio.Task[None] | None = None
        while (data := await channel.receive(reader)) is not None:
            match channel.decode_down(data):
                case channel.Endpoints(endpoints):
                    self.pool.update(endpoints)
                case channel.Located(number, held):
                    self.pool.locator.answered(number, held)
                case channel.Elsewhere(others):
                    self.pool.others(others)
                    channel.send(writer, channel.Here(self.pool.ledger.items()))
                case channel.Relied(size, endpoints):
                    self.pool.chooser.exact.rely(size, endpoints)
                case channel.Emptied(endpoint):
                    self.pool.chooser.emptied(endpoint)
                case channel.Keys(keys):
                    self.pool.keyring = Keyring(keys, os.urandom(16))
                case channel.Shed(connections):
                    self.pool.shed = connections
                case channel.Ask(number):
                    channel.send(writer, self.report(number))
                case channel.Look(number, decisions):
                    channel.send(writer, self._looked(number, decisions))
                case channel.Drain(lame_duck, timeout) if draining is None:
                    draining = asyncio.ensure_future(self._drain(lame_duck, timeout))
                case _:
                    pass
        self._done.set()

    async def tick(self, writer: asyncio.StreamWriter) -> None:
        """Look after time-outs and report, once a second."""
        while True:
            planned = self.pool.clock() + _REPORT_SECONDS
            await asyncio.sleep(_REPORT_SECONDS)
            self._lag.woke(planned, self.pool.clock())
            now = self.pool.loop.time()
            if now - self._looked_at > LOOK_SECONDS:
                self.pool.chooser.decisions = None
            for client in list(self._clients):
                client.sweep(now)
            self.pool.connections.sweep(set(self.pool.directory.known))
            self.pool.admission.sweep()
            self.pool.expire()
            self.pool.access.flush()
            if self._certificate is not None:
                self._certificate.refresh()
            channel.send(writer, self.report())

    async def _drain(self, lame_duck: float, longest: float) -> None:
        """Serve what comes for ``lame_duck`` seconds, then what runs, then end; ``longest`` seconds in all."""
        end = self.pool.loop.time() + longest
        self.pool.draining = True
        await asyncio.sleep(lame_duck)
        self._server.close()
        while self.pool.loop.time() < end:
            for client in list(self._clients):
                client.drain()
            if not any(client.busy for client in self._clients):
                break
            await asyncio.sleep(0.05)
        self._done.set()

    async def ended(self) -> None:
        """Wait until there is nothing left to do."""
        await self._done.wait()
        self._server.close()
        for client in list(self._clients):
            client.drain()
        # A moment for answers on their way out of this process.
        deadline = self.pool.loop.time() + 0.5
        while any(client.unsent for client in self._clients) and self.pool.loop.time() < deadline:  # noqa: ASYNC110 - no event says it
            await asyncio.sleep(0.02)


async def serve(listener: socket.socket, control: socket.socket) -> None:
    """Run a data process on its two sockets."""
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection(sock=control)
    first = await channel.receive(reader)
    if first is None:
        return
    hello = channel.decode_down(first)
    assert isinstance(hello, channel.Hello)
    settings = hello.settings
    rng = Random()  # noqa: S311 - spreads load, keeps no secret
    pool = Pool(loop, settings.config, settings.limits, rng, settings.workers)
    if hello.keys is not None:
        pool.keyring = Keyring(hello.keys, os.urandom(16))
    if settings.config.tracing_url:
        pool.tracing = Tracing(settings.config, rng)
    certificate = Certificate(settings.tls) if settings.tls is not None else None
    models = routes.models_answer(settings.config, int(time.time()))
    clients: set[ClientConnection] = set()
    server = await loop.create_server(
        lambda: ClientConnection(pool, clients, models),
        sock=listener,
        backlog=BACKLOG,
        ssl=None if certificate is None else certificate.context,
        ssl_handshake_timeout=None if certificate is None else _HANDSHAKE_SECONDS,
    )
    pool.locator.attach(writer)
    process = DataProcess(pool, server, clients, certificate)
    channel.send(writer, process.report())
    gc.collect()
    gc.freeze()
    tasks = [asyncio.ensure_future(process.follow(reader, writer)), asyncio.ensure_future(process.tick(writer))]
    await process.ended()
    pool.access.flush()
    channel.send(writer, process.report())
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pool.connections.close()
    if pool.tracing is not None:
        await asyncio.to_thread(pool.tracing.close)
    writer.close()


def main() -> None:
    """Entry point of the process."""
    # Signals go to the whole process group; the control process alone decides when to stop.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener, control = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    uvloop.run(serve(listener, control))
    os._exit(0)


if __name__ == "__main__":
    main()
