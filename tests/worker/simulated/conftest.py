"""Engines on loopback addresses, each in the test's own event loop."""

import contextlib
import itertools
import os

import aiohttp
import pytest

from twinpool.worker.engines.simulated import flags
from twinpool.worker.engines.simulated.server import running

_numbers = itertools.count(1)


class Client:
    """An engine, seen from outside."""

    def __init__(self, session, host, app):
        self.session, self.host, self.app = session, host, app
        self.url = f"http://{host}:8000"

    async def get(self, path):
        async with self.session.get(self.url + path) as response:
            return response.status, await response.read()

    async def post(self, path, body, headers=None):
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def complete(self, prompt, status=200, headers=None, **fields):
        got, body = await self.post("/v1/completions", {"model": "m", "prompt": prompt, **fields}, headers)
        assert got == status, body
        return body


@pytest.fixture
async def engines():
    """Return a function that starts an engine with more flags and gives a :class:`Client`."""
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def start(*argv):
            number = next(_numbers)
            # Of this process: others run the same tests beside it.
            host = f"127.{96 + os.getpid() % 28}.{os.getpid() // 28 % 256}.{number % 250 + 1}"
            settings = flags.parse(["--host", host, "--model", "m", "--time-scale", "0.01", *argv])
            return Client(session, host, await stack.enter_async_context(running(settings)))

        yield start


@pytest.fixture
async def pair(engines):
    """Return a prefill and a decode engine that hand off."""
    argv = ("--connector", "nixl", "--lease-seconds", "0.6", "--handshake-timeout", "0.3")
    return await engines("--role", "prefill", *argv), await engines("--role", "decode", *argv)
