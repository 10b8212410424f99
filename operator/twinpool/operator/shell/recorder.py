"""Kubernetes Events about pools: written beside the status, counted when they repeat, lost without harm."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.operator.logic.notes import Note, event, transitions
from twinpool.operator.shell.cluster import ApiRefused, Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twinpool.operator.shell.watch import PoolKey

_log = logging.getLogger(__name__)

#: Events of one pool within :data:`WINDOW` seconds; a pool that flaps longer says no more than these.
MOST = 20
WINDOW = 60.0


class Recorder:
    """Writes Events for as long as the API server takes them; a refusal is logged once and ends nothing."""

    def __init__(self, cluster: Cluster, reporter: str = "", clock: Callable[[], float] = time.time) -> None:
        self._cluster = cluster
        self._reporter = reporter
        self._clock = clock
        #: Count and first time of what was said, by name of the Event; recent times by pool.
        self._said: dict[PoolKey, dict[str, tuple[int, float]]] = {}
        self._recent: dict[PoolKey, list[float]] = {}
        self._told_refusal = False

    async def changed(self, key: PoolKey, uid: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Write the Events of a status that has just been written."""
        for note in transitions(before, after):
            await self._write(key, uid, note)

    def forget(self, key: PoolKey) -> None:
        """Forget a pool that is gone."""
        self._said.pop(key, None)
        self._recent.pop(key, None)

    async def _write(self, key: PoolKey, uid: str, note: Note) -> None:
        now = self._clock()
        recent = [at for at in self._recent.get(key, ()) if now - at < WINDOW]
        self._recent[key] = recent
        if len(recent) >= MOST:
            return
        recent.append(now)
        namespace, name = key
        pool = {
            "apiVersion": protocol.API_VERSION,
            "kind": protocol.KIND,
            "namespace": namespace,
            "name": name,
            "uid": uid,
        }
        body = event(note, pool, self._reporter, 1, now, now)
        said = self._said.setdefault(key, {})
        count, first = said.get(body["metadata"]["name"], (0, now))
        said[body["metadata"]["name"]] = (count + 1, first)
        try:
            await self._cluster.apply(event(note, pool, self._reporter, count + 1, first, now))
        except ApiRefused as error:
            if not self._told_refusal:
                _log.warning("Events cannot be written: %s", error)
            self._told_refusal = True
