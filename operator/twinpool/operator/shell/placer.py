"""Deciding about nodes for all pools at once, while pods wait for one: reads the cluster, decides, tells the pools.

Nodes and other people's pods are read only then, and again after a growing pause while something is short: a watch on
every pod of a large cluster would cost all the time what is needed for seconds. Only the leader decides, in one place,
so two pools never get one GPU. What was read is old by the time that it is used; kube-scheduler has the last word, and
a group that lost a race is decided about again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.core.links import with_measured
from twinpool.operator.logic import measured_links
from twinpool.operator.logic.groups import Group, groups
from twinpool.operator.logic.observed import Observed
from twinpool.operator.logic.pinning import claimed, coming
from twinpool.operator.logic.placement import reading
from twinpool.operator.logic.placement.ledger import Claim, Ledger, decide
from twinpool.operator.logic.slow_links import known
from twinpool.operator.shell.cluster import ApiRefused
from twinpool.operator.shell.observe import read_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twinpool.core.spec import InferencePool
    from twinpool.core.topology import Topology
    from twinpool.operator.logic.placement.model import SlowLinks, Verdict
    from twinpool.operator.shell.cluster import Cluster
    from twinpool.operator.shell.lease import Leadership
    from twinpool.operator.shell.watch import Cache, PoolKey

_log = logging.getLogger(__name__)

#: Seconds to wait for more pods of the same change before deciding, and at most for what a pool is about to make.
GATHER, SETTLE = 0.2, 3.0
#: Seconds from one look at a short cluster to the next: doubled each time, up to the longest.
SHORTEST, LONGEST = 2.0, 30.0

#: Pods that hold nothing any more are not sent.
_HOLDING = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}


class Placer:
    """Keeps the last decisions; ``decided`` is called with every pool whose decisions changed."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        leadership: Leadership,
        topology: Topology,
        decided: Callable[[PoolKey], None],
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._leadership = leadership
        self._topology = topology
        self._decided = decided
        self._woken = asyncio.Event()
        self._ledger = Ledger({}, {})
        self._pause = SHORTEST
        #: Whether pods wait about which nothing was decided yet, and when something was decided last.
        self._urgent = False
        self._last = float("-inf")
        self._told: set[str] = set()

    def wake(self) -> None:
        """Decide soon: a pod waits for a node."""
        self._urgent = True
        self.look_again()

    def look_again(self) -> None:
        """Decide again before long: something changed, and what is short may not be short any more."""
        self._pause = SHORTEST
        self._woken.set()

    def verdicts(self, key: PoolKey) -> Mapping[str, Verdict]:
        """Return what was decided about a pool's groups, by their names in the pool's namespace."""
        start = f"{key[0]}/"
        return {name[len(start) :]: found for name, found in self._ledger.verdicts.items() if name.startswith(start)}

    def forget_all(self) -> None:
        """Forget every decision: another operator leads."""
        self._ledger = Ledger({}, {})

    async def run(self) -> None:
        """Decide whenever something waits, until cancelled."""
        while True:
            await self._leadership.held.wait()
            short = any(verdict.short for verdict in self._ledger.verdicts.values())
            try:
                async with asyncio.timeout(self._pause if short else None):
                    await self._woken.wait()
            except TimeoutError:
                self._pause = min(2 * self._pause, LONGEST)
            await self._gather()
            try:
                await self._decide()
            except ApiRefused as error:
                _log.warning("nodes and pods cannot be read for placement: %s; trying again in %.0f s", error, LONGEST)
                await asyncio.sleep(LONGEST)
                self.wake()

    async def _gather(self) -> None:
        """Wait for more of the same change; nobody waits long for a first answer, and no flood of events costs much."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(GATHER if self._urgent else max(GATHER, self._last + SHORTEST - now))
        # A group that is decided about before the rest of its pool is there may get the rest's best place.
        for _ in range(round(SETTLE / GATHER)):
            if not self._more_come():
                break
            await asyncio.sleep(GATHER)
        self._woken.clear()
        self._urgent, self._last = False, asyncio.get_running_loop().time()

    async def _decide(self) -> None:
        claims = self._claims()
        before = self._ledger
        if not any(claim.waits for _, claim in claims):
            self._ledger = Ledger({}, {})
            return
        nodes = [reading.node(body) async for page in self._cluster.pages("Node", {}) for body in page]
        pods = [reading.held(body) async for page in self._cluster.pages("Pod", _HOLDING) for body in page]
        made = await asyncio.to_thread(
            decide,
            [claim for _, claim in claims],
            before.promises,
            nodes,
            [pod for pod in pods if pod],
            self._known_topology(),
            self._slow(),
        )
        self._ledger = made
        self._tell(made)
        for key in sorted({key for key, claim in claims if _differs(before, made, claim)}):
            self._decided(key)

    def _claims(self) -> list[tuple[PoolKey, Claim]]:
        """Return the groups of all pools whose nodes are ours to choose; a pool that cannot be read has none."""
        found = []
        for key in self._cache.pools():
            if (observed := self._observed(key)) is not None:
                found += [(key, Claim(observed.pool, group)) for group in _own(observed)]
        return found

    def _observed(self, key: PoolKey) -> Observed | None:
        """Return a pool that has a ``placement`` block and can be read, with what belongs to it."""
        pool = self._read(key, "spec", "placement")
        return None if pool is None else Observed(pool, tuple(self._cache.children(key)), self._cache.pods(key))

    def _read(self, key: PoolKey, part: str, field: str) -> InferencePool | None:
        """Return a pool that has this field and can be read."""
        body = self._cache.pool(key)
        with contextlib.suppress(ValueError):
            return read_pool(body) if body is not None and body[part].get(field) is not None else None
        return None

    def _slow(self) -> SlowLinks:
        """Return the links that any pool knows to be slow."""
        pools = [self._read(key, "status", "slowLinks") for key in self._cache.pools()]
        return known(pool for pool in pools if pool is not None)

    def _known_topology(self) -> Topology:
        """Return the network as it was told, with what groups measured of it."""
        pools = [self._read(key, "status", "links") for key in self._cache.pools()]
        return with_measured(self._topology, measured_links.known(pool for pool in pools if pool is not None))

    def _more_come(self) -> bool:
        """Return whether a pool of which something waits is about to get more pods."""
        for key in self._cache.pools():
            gated = any(protocol.PLACEMENT_GATE in pod.scheduling_gates for pod in self._cache.pods(key))
            if gated and (observed := self._observed(key)) is not None and coming(observed, groups(observed)):
                return True
        return False

    def _tell(self, made: Ledger) -> None:
        """Log what is wrong with nodes' labels, once."""
        for text in made.complaints:
            if text not in self._told:
                _log.warning("topology: %s", text)
        self._told = set(made.complaints)


def _own(observed: Observed) -> list[Group]:
    return claimed(groups(observed))


def _differs(before: Ledger, made: Ledger, claim: Claim) -> bool:
    return before.verdicts.get(claim.name) != made.verdicts.get(claim.name)
