"""From the caches to one :class:`Observed`, and the memory of what was written last."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.spec import InferencePool
from twinpool.operator.logic import names
from twinpool.operator.logic.contest import Contest, Repair, contests, recent
from twinpool.operator.logic.drift import contains_wanted, digest
from twinpool.operator.logic.observed import Child, Observed, Refusal, read_child

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.operator.shell.watch import Cache, PoolKey

#: Metadata of a pool that planning reads.
_METADATA = ("name", "namespace", "uid", "generation", "resourceVersion", "annotations", "labels", "deletionTimestamp")


class Memory:
    """What this process remembers about its own writes; losing it costs one repeated write per odd child."""

    def __init__(self) -> None:
        self._settled: dict[tuple[PoolKey, str, str], tuple[str, str, str]] = {}
        self._refusals: dict[PoolKey, tuple[Refusal, ...]] = {}
        self._repairs: dict[PoolKey, tuple[Repair, ...]] = {}
        self._serials: dict[PoolKey, int] = {}
        self._tried: dict[PoolKey, frozenset[tuple[str, str]]] = {}
        self._written: dict[PoolKey, dict[str, Child]] = {}

    def wrote(self, key: PoolKey, child: Child) -> None:
        """Remember a child as a write of ours left it, until a watch has shown that or something newer.

        Which group goes depends on work in flight, which is another one a moment later: a plan that did not know of
        the groups which were just marked would mark more.
        """
        self._written.setdefault(key, {})[child.uid] = child

    def newest(self, key: PoolKey, children: Iterable[Child]) -> list[Child]:
        """Return what watches have shown, or what our own writes left where that is newer."""
        written = self._written.pop(key, {})
        found = [_newer(child, written.get(child.uid, child)) for child in children]
        if still := {child.uid: child for child in found if written.get(child.uid) is child}:
            self._written[key] = still
        return found

    def applied(self, key: PoolKey, wanted: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Remember an apply that the API server took but stored differently (``1024Mi`` as ``1Gi``)."""
        child = read_child(wanted["kind"], answer)
        place = (key, child.kind, child.name)
        if contains_wanted(child, wanted):
            self._settled.pop(place, None)
        else:
            self._settled[place] = (child.uid, digest(child.content), digest(wanted))

    def repaired(self, key: PoolKey, repair: Repair) -> None:
        """Remember that a child was put right against another writer."""
        self._repairs[key] = (*recent(self._repairs.get(key, ()), repair.at), repair)

    def contests(self, key: PoolKey, now: float) -> tuple[Contest, ...]:
        """Return the children that are left to another writer at ``now``."""
        return contests(self._repairs.get(key, ()), now)

    def noticed(self, key: PoolKey, children: Iterable[Child]) -> None:
        """Remember the numbers of groups that a watch has shown, after they are gone too.

        Not of those that were just made: a plan from the same view must give the same names again.
        """
        serials = [child.annotation(names.SERIAL_ANNOTATION) or "" for child in children if child.kind == "StatefulSet"]
        self._serials[key] = max([self.last_serial(key), *(int(serial) for serial in serials if serial.isdecimal())])

    def last_serial(self, key: PoolKey) -> int:
        """Return the highest number of a group that was seen."""
        return self._serials.get(key, 0)

    def refused(self, key: PoolKey, refusals: tuple[Refusal, ...]) -> bool:
        """Remember what was refused in the last reconciliation; return whether that is news."""
        news = self._refusals.get(key, ()) != refusals
        if refusals:
            self._refusals[key] = refusals
        else:
            self._refusals.pop(key, None)
        return news

    def took(self, key: PoolKey, revision: str, role: str) -> None:
        """Remember that the API server would take a set; only of the newest revision, as others have groups."""
        kept = {entry for entry in self.tried(key) if entry[0] == revision}
        self._tried[key] = frozenset({*kept, (revision, role)})

    def tried(self, key: PoolKey) -> frozenset[tuple[str, str]]:
        """Return revision and role of the sets that the API server would take."""
        return self._tried.get(key, frozenset())

    def forget(self, key: PoolKey) -> None:
        """Forget a pool that is gone."""
        self._written.pop(key, None)
        self._tried.pop(key, None)
        self._refusals.pop(key, None)
        self._repairs.pop(key, None)
        self._serials.pop(key, None)
        for place in [place for place in self._settled if place[0] == key]:
            del self._settled[place]

    def refusals(self, key: PoolKey) -> tuple[Refusal, ...]:
        """Return what was refused in the last reconciliation."""
        return self._refusals.get(key, ())

    def with_settled(self, key: PoolKey, child: Child) -> Child:
        """Return the child with the digest of what gave it, if it still is as that left it."""
        known = self._settled.get((key, child.kind, child.name))
        if known is None or known[:2] != (child.uid, digest(child.content)):
            return child
        return dataclasses.replace(child, settled=known[2])


def _newer(seen: Child, written: Child) -> Child:
    """Resource versions of one kind are numbers that grow; from an API server that says otherwise, a watch is right."""
    versions = (seen.resource_version, written.resource_version)
    if not all(version.isdecimal() for version in versions):
        return seen
    return written if int(versions[1]) > int(versions[0]) else seen


def read_pool(body: Mapping[str, Any]) -> InferencePool:
    """Parse a pool.

    Raises
    ------
    ValueError
        When it does not fit the API types (it was stored by another version of the CRD).
    """
    metadata = {key: value for key, value in body["metadata"].items() if key in _METADATA}
    return InferencePool.model_validate({"metadata": metadata, "spec": body["spec"], "status": body["status"]})


def observe(
    key: PoolKey,
    pool: InferencePool,
    cache: Cache,
    memory: Memory,
    now: float,
    complaints: Mapping[str, str] | None = None,
) -> Observed:
    """Return everything that is known about a pool. Children of an earlier pool of the same name are not its own."""
    known = memory.newest(key, cache.children(key))
    own = [child for child in known if belongs(child, pool.metadata.name, pool.metadata.uid)]
    said = complaints or {}
    children = tuple(
        dataclasses.replace(child, complaint=said[child.name])
        if child.kind == "StatefulSet" and child.name in said
        else child
        for child in (memory.with_settled(key, child) for child in own)
    )
    memory.noticed(key, children)
    return Observed(
        pool,
        children,
        cache.pods(key),
        memory.refusals(key),
        memory.contests(key, now),
        memory.last_serial(key),
        tried=memory.tried(key),
    )


def belongs(child: Child, pool: str, uid: str) -> bool:
    """Return whether a child is the pool's: owned by it, or labelled as its own and owned by nobody."""
    owners = [owner for owner in child.content["metadata"]["ownerReferences"] if owner.get("controller")]
    if owners:
        return any(owner.get("uid") == uid for owner in owners)
    return child.label(protocol.LABEL_MANAGED_BY) == protocol.MANAGED_BY and child.label(protocol.LABEL_POOL) == pool
