"""``twinpool-worker simulate``: starts the simulated engine and ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING

import uvloop

from twinpool.core.errors import TwinpoolError
from twinpool.worker.engines.simulated import flags
from twinpool.worker.engines.simulated.shell.app import App
from twinpool.worker.engines.simulated.shell.http import Connection
from twinpool.worker.engines.simulated.shell.rank import BACKLOG, Rank, address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from twinpool.worker.engines.simulated.flags import Settings


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
    ranks = [Rank(settings, number) for number in range(settings.data_parallel)]
    app = App(settings, ranks)
    connections: set[Connection] = set()
    server = None
    try:
        with address(settings.host, settings.port):
            make = functools.partial(Connection, app.handle, connections, settings.max_body_bytes)
            loop = asyncio.get_running_loop()
            server = await loop.create_server(make, settings.host, settings.port, backlog=BACKLOG)
        async with contextlib.AsyncExitStack() as stack:
            for rank in ranks:
                await stack.enter_async_context(rank.running(on_end))
            yield app
    finally:
        if server is not None:
            server.close()
        for connection in tuple(connections):
            connection.shut()
        for rank in ranks:
            await rank.close()


if __name__ == "__main__":
    sys.exit(main())
