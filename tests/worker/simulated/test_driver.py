"""A bug in the engine ends the process instead of leaving a server that never answers."""

import asyncio

import pytest

from twinpool.worker.engines.simulated import flags
from twinpool.worker.engines.simulated.server import running


async def test_an_engine_that_breaks_is_noticed(monkeypatch):
    settings = flags.parse(["--host", "127.94.0.1", "--model", "m"])
    ended = asyncio.Event()

    async def serve():
        async with running(settings, on_end=ended.set) as app:

            def broken(now):
                raise RuntimeError(f"broken at {now}")

            monkeypatch.setattr(app.engine, "begin", broken)
            await asyncio.wait_for(ended.wait(), 10)

    with pytest.raises(RuntimeError, match="broken at"):
        await serve()
