"""What preflights say of the network's levels: kept in each pool's status, and put together for placement.

What a group measured is noted on it and goes with it, so the status remembers each level for a day. Flags are raised
against what the operator was told (:mod:`.interconnect`), never against this: that a network is slow as a whole must
not become its promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.core.links import Measured, combined
from twinpool.operator.logic.interconnect import noted
from twinpool.operator.logic.observed import seconds, timestamp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.core.spec import InferencePool
    from twinpool.core.topology import Topology
    from twinpool.operator.logic.groups import Group

#: Seconds for which a level that no group measures any more is remembered.
REMEMBERED = 86_400.0

Entry = dict[str, Any]


def remembered(pool: InferencePool, groups: Iterable[Group], topology: Topology, now: float) -> list[Entry]:
    """Return ``status.links``: the medians of the groups that are there, and earlier ones of other levels."""
    said = {level.name: int(level.bandwidth) for level in topology.levels}
    notes = [note for group in groups if (note := noted(group)) is not None and note.levels]
    newest = {item.level: note.at for note in sorted(notes, key=lambda note: note.at) for item in note.levels}
    found = {
        level: _entry(item, said[level], newest[level])
        for level, item in combined(item for note in notes for item in note.levels).items()
        if level in said
    }
    for item in pool.status.links or ():
        if item.level in said and now - (seconds(item.since) or 0.0) < REMEMBERED:
            found.setdefault(
                item.level, {**item.model_dump(by_alias=True, mode="json"), "configured": said[item.level]}
            )
    return [found[level] for level in said if level in found]


def _entry(item: Measured, configured: int, at: float) -> Entry:
    return {
        "level": item.level,
        "pairs": item.pairs,
        "bandwidth": int(item.bandwidth),
        "latency": item.latency,
        "configured": configured,
        "since": timestamp(at),
    }


def known(pools: Iterable[InferencePool]) -> tuple[Measured, ...]:
    """Return what the groups of all pools measured."""
    return tuple(
        Measured(item.level, item.pairs, float(item.bandwidth), item.latency)
        for pool in pools
        for item in pool.status.links or ()
    )
