"""Asking routers for their books, for as long as something in a pool waits for what they say.

Asking never holds up a reconciliation: one task per pool asks, keeps the last answers, and wakes the pool when they
change in a way that decisions turn on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import aiohttp

from twinpool.core import protocol
from twinpool.operator.logic.books import Report, Reports, read_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from twinpool.operator.logic.observed import PodView
    from twinpool.operator.shell.watch import PoolKey

_log = logging.getLogger(__name__)

#: Seconds for one answer; a router gives its data processes one second for theirs.
TIMEOUT = 2.5
#: Seconds between two questions: while answers change, and at most.
QUICK, SLOW = 0.25, 2.0
#: Questions under way at the same time, over all pools.
AT_ONCE = 32
#: A pool of 1000 groups takes about 400 bytes each.
MAX_ANSWER = 4 * 2**20

_READ_ERRORS = (aiohttp.ClientError, OSError, TimeoutError, ValueError)


class RouterBooks:
    """The last answers of the routers of every pool in which something waits."""

    def __init__(self, changed: Callable[[PoolKey], None]) -> None:
        self._changed = changed
        self._tasks: dict[PoolKey, asyncio.Task[None]] = {}
        self._asked: dict[PoolKey, tuple[PodView, ...]] = {}
        self._reports: dict[PoolKey, Reports] = {}
        self._session: aiohttp.ClientSession | None = None
        self._room = asyncio.Semaphore(AT_ONCE)

    def reports(self, key: PoolKey) -> Reports | None:
        """Return the last answers, None before the first ones."""
        return self._reports.get(key)

    def follow(self, key: PoolKey, asked: Iterable[PodView]) -> None:
        """Ask these routers from now on; nobody when there are none."""
        self._asked[key] = tuple(asked)
        if not self._asked[key]:
            self.forget(key)
        elif key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._ask_on(key), name=f"routers of {'/'.join(key)}")

    def forget(self, key: PoolKey) -> None:
        """Stop asking, and forget what was said: it would be old when it is needed next."""
        self._asked.pop(key, None)
        self._reports.pop(key, None)
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    def forget_all(self) -> None:
        """Stop asking for any pool: another operator leads."""
        for key in list(self._tasks):
            self.forget(key)

    async def close(self) -> None:
        """Stop asking anybody."""
        tasks = list(self._tasks.values())
        self.forget_all()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _ask_on(self, key: PoolKey) -> None:
        pause = QUICK
        while True:
            asked = self._asked[key]
            answers = await asyncio.gather(*(self._ask(router.address) for router in asked))
            found = dict(zip((router.name for router in asked), answers, strict=True))
            before = self._reports.get(key)
            self._reports[key] = found
            pause = min(2 * pause, SLOW)
            if before is None or _gist(before) != _gist(found):
                pause = QUICK
                self._changed(key)
            await asyncio.sleep(pause)

    async def _ask(self, address: str) -> Report | None:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{protocol.ROUTER_ADMIN_PORT}/admin/endpoints"
        try:
            async with self._room, asyncio.timeout(TIMEOUT):
                return read_report(await self._fetch(url))
        except _READ_ERRORS as error:
            _log.debug("%s did not answer: %s: %s", url, type(error).__name__, error)
            return None

    async def _fetch(self, url: str) -> Any:
        if self._session is None:
            # Routers answer on one connection per question; proxies of the environment are not for pod addresses.
            self._session = aiohttp.ClientSession(trust_env=False, connector=aiohttp.TCPConnector(force_close=True))
        async with self._session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                return None
            text = bytearray()
            async for piece in response.content.iter_chunked(65536):
                text += piece
                if len(text) > MAX_ANSWER:
                    return None
            return json.loads(text)


def _gist(reports: Reports) -> object:
    return {name: None if report is None else report.gist() for name, report in reports.items()}
