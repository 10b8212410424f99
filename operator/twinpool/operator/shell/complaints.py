"""What controllers say about pods that they cannot make; read only while a group lacks pods."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from twinpool.operator.logic.admission import complaint, lacking
from twinpool.operator.logic.groups import groups
from twinpool.operator.shell.cluster import ApiRefused, Cluster

if TYPE_CHECKING:
    from twinpool.operator.logic.observed import Observed
    from twinpool.operator.shell.watch import PoolKey

#: Seconds until a controller is listened to again: soon while it has said nothing, then now and then.
SOON, LATER = 2.0, 30.0


class Complaints:
    """The last words about each set that lacks pods, by name of the set."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._said: dict[PoolKey, dict[str, str]] = {}
        self._next: dict[PoolKey, float] = {}

    def of(self, key: PoolKey) -> dict[str, str]:
        """Return what is known now."""
        return self._said.get(key, {})

    def forget(self, key: PoolKey) -> None:
        """Forget a pool that is gone, or that lacks nothing."""
        self._said.pop(key, None)
        self._next.pop(key, None)

    async def listen(self, key: PoolKey, observed: Observed) -> float | None:
        """Read about the sets that lack pods, if it is time; return the seconds until it is again, None for never.

        A refusal is no error: then the pool is explained by what the watches show.
        """
        short = lacking(groups(observed))
        if not short:
            self.forget(key)
            return None
        now = asyncio.get_running_loop().time()
        if now >= self._next.get(key, now):
            said = {}
            for group in short:
                try:
                    text = complaint(await self._cluster.events(key[0], "StatefulSet", group.name))
                except ApiRefused:
                    text = self.of(key).get(group.name, "")
                if text:
                    said[group.name] = text
            self._said[key] = said
            self._next[key] = now + (LATER if said else SOON)
        return self._next[key] - now
