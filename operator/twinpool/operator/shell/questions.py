"""Asking pods: routers for their books, launchers for their engines' lives, weights and preflights.

Nobody is asked for longer than a pool waits for what they say.

Asking never holds up a reconciliation: one task per pool asks, keeps the last answers, and wakes the pool when they
change in a way that decisions turn on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import aiohttp

from twinpool.core import protocol
from twinpool.operator.logic.books import Report, read_report
from twinpool.operator.logic.interconnect import Preflight, read_preflight
from twinpool.operator.logic.loading import Weights, read_weights
from twinpool.operator.logic.restarts import Life, read_life

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

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

_Answer = TypeVar("_Answer")


class Questions(ABC, Generic[_Answer]):
    """The last answers of the pods of every pool in which something waits for them."""

    #: Where every pod is asked.
    path: str
    #: Seconds between two questions at most; None: :data:`SLOW`.
    slow: float | None = None

    def __init__(self, changed: Callable[[PoolKey], None]) -> None:
        self._changed = changed
        self._tasks: dict[PoolKey, asyncio.Task[None]] = {}
        self._asked: dict[PoolKey, tuple[PodView, ...]] = {}
        self._answers: dict[PoolKey, Mapping[str, _Answer | None]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._room = asyncio.Semaphore(AT_ONCE)

    @abstractmethod
    def port(self) -> int:
        """Return the port on which every pod is asked."""

    @abstractmethod
    def key(self, pod: PodView) -> str:
        """Return what a pod's answer is known by."""

    @abstractmethod
    def read(self, document: Any) -> _Answer | None:
        """Return what an answer says, None when it is no such answer."""

    @abstractmethod
    def gist(self, answer: _Answer) -> object:
        """Return what decisions turn on; only its changes are news."""

    def answers(self, key: PoolKey) -> Mapping[str, _Answer | None] | None:
        """Return the last answers, None before the first ones."""
        return self._answers.get(key)

    def follow(self, key: PoolKey, asked: Iterable[PodView]) -> None:
        """Ask these pods from now on; nobody when there are none."""
        self._asked[key] = tuple(asked)
        if not self._asked[key]:
            self.forget(key)
        elif key not in self._tasks:
            self._tasks[key] = asyncio.create_task(self._ask_on(key), name=f"{self.path} of {'/'.join(key)}")

    def forget(self, key: PoolKey) -> None:
        """Stop asking, and forget what was said: it would be old when it is needed next."""
        self._asked.pop(key, None)
        self._answers.pop(key, None)
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
            answers = await asyncio.gather(*(self._ask(pod.address) for pod in asked))
            found = dict(zip((self.key(pod) for pod in asked), answers, strict=True))
            before = self._answers.get(key)
            self._answers[key] = found
            self.heard(key, found)
            pause = min(2 * pause, SLOW if self.slow is None else self.slow)
            if before is None or self._gists(before) != self._gists(found):
                pause = QUICK
                self._changed(key)
            await asyncio.sleep(pause)

    def heard(self, key: PoolKey, answers: Mapping[str, _Answer | None]) -> None:
        """Take note of the answers of one round; most askers need only the last ones."""

    def _gists(self, answers: Mapping[str, _Answer | None]) -> object:
        return {name: None if answer is None else self.gist(answer) for name, answer in answers.items()}

    async def _ask(self, address: str) -> _Answer | None:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{self.port()}{self.path}"
        try:
            async with self._room, asyncio.timeout(TIMEOUT):
                return self.read(await self._fetch(url))
        except _READ_ERRORS as error:
            _log.debug("%s did not answer: %s: %s", url, type(error).__name__, error)
            return None

    async def _fetch(self, url: str) -> Any:
        if self._session is None:
            # They answer on one connection per question; proxies of the environment are not for pod addresses.
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


class RouterBooks(Questions[Report]):
    """What routers say, by name of their pods, while a group waits for its gate, drains, or is to be chosen."""

    path = "/admin/endpoints"

    def port(self) -> int:
        """See :class:`Questions`."""
        return protocol.ROUTER_ADMIN_PORT

    def key(self, pod: PodView) -> str:
        """See :class:`Questions`."""
        return pod.name

    def read(self, document: Any) -> Report | None:
        """See :class:`Questions`."""
        return read_report(document)

    def gist(self, answer: Report) -> object:
        """See :class:`Questions`."""
        return answer.gist()


class Launchers(Questions[_Answer]):
    """What launchers say, by uid of their pods."""

    def port(self) -> int:
        """See :class:`Questions`."""
        return protocol.LAUNCHER_PORT

    def key(self, pod: PodView) -> str:
        """See :class:`Questions`."""
        return pod.uid

    def gist(self, answer: _Answer) -> object:
        """See :class:`Questions`."""
        return answer


class EngineLives(Launchers[Life]):
    """What the launchers of leaders say, by uid of their pods, while an engine that has served is not ready."""

    path = "/status"

    def read(self, document: Any) -> Life | None:
        """See :class:`Questions`."""
        return read_life(document)


class Preflights(Launchers[Preflight]):
    """What the launchers of leaders say, by uid of their pods, until the preflights of their groups are noted."""

    path = "/preflight"

    def read(self, document: Any) -> Preflight | None:
        """See :class:`Questions`."""
        return read_preflight(document)


class WeightLoads(Launchers[Weights]):
    """What the launchers of starting pods say of their weights."""

    path = "/status"

    def read(self, document: Any) -> Weights | None:
        """See :class:`Questions`."""
        return read_weights(document)

    def gist(self, answer: Weights) -> object:
        """See :class:`Questions`."""
        return answer.step
