"""``twinpool-worker simulate``: starts the simulated engine and ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import signal
import sys
import time
import traceback
import uuid
from typing import TYPE_CHECKING

import uvloop

from twinpool.core.errors import TwinpoolError
from twinpool.worker.engines.simulated import flags
from twinpool.worker.engines.simulated.logic.engine import Engine
from twinpool.worker.engines.simulated.shell.app import App
from twinpool.worker.engines.simulated.shell.driver import Driver
from twinpool.worker.engines.simulated.shell.http import Connection
from twinpool.worker.engines.simulated.shell.publisher import Publisher
from twinpool.worker.engines.simulated.shell.transfer import Holder, Puller

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from twinpool.worker.engines.simulated.flags import Settings

_BACKLOG = 2048


class AddressRefused(TwinpoolError):
    """An address that the engine should listen on cannot be had."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code."""
    try:
        settings = flags.parse(sys.argv[1:] if argv is None else argv)
        _fail_at_start(settings)
        uvloop.run(_wait() if settings.headless else _serve(settings))
    except TwinpoolError as error:
        say(f"{type(error).__name__}: {error}", "ERROR")
        return 1
    return 0


def say(text: str, level: str = "INFO") -> None:
    """Write one log line, in the shape of vLLM's."""
    print(f"{level} {time.strftime('%m-%d %H:%M:%S')} [simulated] {text}", file=sys.stderr, flush=True)


def _fail_at_start(settings: Settings) -> None:
    """Wait as for a load; then play the failure that was asked for, with the lines that vLLM would print."""
    model = settings.models[0]
    say(f"loading {model} (invented; times of {settings.pace.shape.name} on {settings.pace.gpu.name})")
    time.sleep(settings.startup_seconds * settings.time_scale)
    match settings.faults.at_start:
        case "model-missing":
            say(
                f"OSError: {model} is not a local folder and is not a valid model identifier listed on the hub", "ERROR"
            )
        case "oom-at-load":
            say("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB.", "ERROR")
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash-at-start":
            try:
                raise RuntimeError("this crash was asked for with --fault crash-at-start")
            except RuntimeError:
                traceback.print_exc()
        case _:
            return
    raise SystemExit(1)


async def _wait() -> None:
    """Be a rank above 0: hold nothing, and end when asked."""
    stop = _stop_signal()
    say("headless rank runs")
    await stop.wait()
    say("stopping")


def _stop_signal() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _serve(settings: Settings) -> None:
    stop = _stop_signal()
    async with running(settings, on_end=stop.set) as app:
        say(f"{settings.role} engine serves {', '.join(settings.models)} on {settings.host}:{settings.port}")
        await stop.wait()
        app.drain()
        say(f"stopping; running requests have {settings.shutdown_timeout:g} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.shutdown_timeout):
                await app.idle()
        app.end()


@contextlib.asynccontextmanager
async def running(settings: Settings, on_end: Callable[[], None] = lambda: None) -> AsyncIterator[App]:
    """Run an engine while the block runs; ``on_end`` is called when the engine itself ends, which only a bug makes it.

    Raises
    ------
    AddressRefused
        When one of its addresses cannot be had.
    """
    loop = asyncio.get_running_loop()
    engine, engine_id, model = (
        Engine(settings.limits, settings.pace, settings.drafting),
        str(uuid.uuid4()),
        settings.models[0],
    )
    puller = Puller(engine, model, settings.handshake_timeout, settings.time_scale)
    events = settings.events
    publisher = (
        None
        if events is None
        else Publisher(events, settings.host, settings.limits.block_size, settings.faults.lose_events)
    )
    driver = Driver(engine, settings, puller, publisher)
    app = App(settings, driver, engine_id)
    connections: set[Connection] = set()
    servers: list[asyncio.Server] = []
    try:
        with _address(settings.host, settings.port):
            make = functools.partial(Connection, app.handle, connections, settings.max_body_bytes)
            servers.append(await loop.create_server(make, settings.host, settings.port, backlog=_BACKLOG))
        if settings.connector:
            holder = Holder(engine, engine_id, model, driver.wake)
            with _address(settings.host, settings.side_channel_port):
                servers.append(
                    await asyncio.start_server(
                        holder.serve, settings.host, settings.side_channel_port, backlog=_BACKLOG
                    )
                )
        steps = asyncio.create_task(driver.run())
        steps.add_done_callback(lambda _: on_end())
        try:
            yield app
        finally:
            steps.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await steps
            await puller.settled()
    finally:
        for server in servers:
            server.close()
        for connection in tuple(connections):
            connection.shut()
        if publisher is not None:
            await publisher.close()


@contextlib.contextmanager
def _address(host: str, port: int) -> Iterator[None]:
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


if __name__ == "__main__":
    sys.exit(main())
