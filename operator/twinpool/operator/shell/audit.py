"""What the caches still hold although it is gone.

A watch that was away for too long lists everything anew (the API server answers 410 Gone). What was deleted
meanwhile is simply not in that list: no event tells of it, and the caches would keep it for ever. So after such a list
the uids of what exists are compared with the uids in the cache; what is missing is looked up once more, one by one,
because it may be younger than the list, and then forgotten.

The same comparison, the other way round, tells at the start when the caches are complete. Nothing is planned before:
what an operator does not see yet it would make again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from twinpool.operator.shell.cluster import ApiRefused, list_path
from twinpool.operator.shell.watch import kinds, selector

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.operator.shell.cache import Cache, PoolKey
    from twinpool.operator.shell.cluster import Cluster
    from twinpool.operator.shell.streams import Streams

_log = logging.getLogger(__name__)

#: Seconds from a new list to the comparison, and between two attempts.
DELAY = 1.0
RETRY = 1.0
#: Seconds between two comparisons while the caches fill, and how many are made before what exists is listed anew.
SETTLE = 0.1
LOOKS = 50


class Audit:
    """Compares the caches with what exists, kind by kind, when told to."""

    def __init__(self, cluster: Cluster, cache: Cache, namespace: str, seen: Callable[[PoolKey, str], None]) -> None:
        self._cluster = cluster
        self._cache = cache
        self._namespace = namespace
        self._seen = seen
        #: Kinds that are watched; may be replaced before anything is, by what the cluster turned out to serve.
        self.kinds = kinds()
        self._due: set[str] = set()
        self._wake = asyncio.Event()

    def ask(self, path: str) -> None:
        """Compare the kind that was just listed at ``path``."""
        for kind in self.kinds:
            if path.endswith(list_path(kind, self._namespace)):
                self._due.add(kind)
                self._wake.set()

    async def run(self) -> None:
        """Compare what is asked for until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(DELAY)
            self._wake.clear()
            due, self._due = self._due, set()
            for kind in sorted(due):
                try:
                    await self.compare(kind)
                except ApiRefused as error:
                    _log.warning("the cache of %s cannot be compared with what exists: %s", kind, error)
                    self._due.add(kind)
            if self._due:
                await asyncio.sleep(RETRY)
                self._wake.set()

    async def compare(self, kind: str) -> None:
        """Forget what is in the cache of ``kind`` and does not exist."""
        known = self._cache.known(kind)
        if not known:
            return
        existing = await self._uids(kind)
        for key, name, uid in known:
            if uid in existing:
                continue
            if not await self._exists(kind, key[0], name, uid):
                _log.info("%s/%s: %s %s went while the watch was away", *key, kind, name)
                self._cache.remove(kind, uid)
            # A group that exists without our label was edited by hand: the reconciler gives the label back.
            self._seen(key, name if kind == "StatefulSet" else "")

    async def complete(self, streams: Streams) -> None:
        """Return when every kind was listed and everything that exists is in the caches."""
        for kind in self.kinds:
            await streams.watched(list_path(kind, self._namespace))
            while True:
                if await self._complete(kind):
                    break
                await asyncio.sleep(RETRY)

    async def _complete(self, kind: str) -> bool:
        """Wait for a while until all that exists is in the cache; what went meanwhile is not waited for for ever."""
        try:
            existing = await self._uids(kind)
        except ApiRefused as error:
            _log.warning("the cache of %s cannot be compared with what exists: %s", kind, error)
            return False
        for _ in range(LOOKS):
            if existing <= self._cache.uids(kind):
                return True
            await asyncio.sleep(SETTLE)
        return False

    async def _uids(self, kind: str) -> set[str]:
        return await self._cluster.uids(kind, self._namespace, selector(kind))

    async def _exists(self, kind: str, namespace: str, name: str, uid: str) -> bool:
        try:
            found = await self._cluster.get(kind, namespace, name)
        except ApiRefused as error:
            if error.code != 404:
                raise
            return False
        return bool(found["metadata"]["uid"] == uid)
