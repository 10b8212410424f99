"""Telling routers how far workers are from each other: the place of each leader in the network, on its pod.

Only where routers price a handoff. Labels of a node are read when a pod on it has no place yet; what was measured of
the network later changes the bandwidths that stand there. Always true: once every leader has its place, nothing is
written and no node is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.core.distance import Place, place
from twinpool.core.links import with_measured
from twinpool.core.topology import paths
from twinpool.operator.logic.actions import Annotate
from twinpool.operator.logic.measured_links import known

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.core.spec import InferencePool
    from twinpool.core.topology import Topology
    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Observed, PodView


def priced(pool: InferencePool) -> bool:
    """Return whether the pool's routers choose pairs of workers by what a pull takes."""
    return pool.spec.prefill is not None and pool.spec.routing.policy == "price"


def to_read(pool: InferencePool, groups: Iterable[Group], topology: Topology) -> set[str]:
    """Return the nodes whose labels are needed."""
    if not priced(pool):
        return set()
    return {pod.node for pod in _leaders(groups) if _told(pod, topology) is None}


def telling(observed: Observed, groups: Iterable[Group], topology: Topology) -> list[Annotate]:
    """Return the annotations that are missing or out of date."""
    if not priced(observed.pool):
        return []
    now = with_measured(topology, known((observed.pool,)))
    where, _ = paths(topology, observed.node_labels)
    result = []
    for pod in _leaders(groups):
        told = _told(pod, topology)
        path = told.path if told is not None else where.get(pod.node)
        if path is None:
            continue
        wanted = place(path, now)
        if wanted != told:
            result.append(Annotate("Pod", pod.name, pod.uid, protocol.ANNOTATION_PLACE, wanted.to_json()))
    return result


def _leaders(groups: Iterable[Group]) -> list[PodView]:
    """Return the pods that routers speak to and that are on a node."""
    leaders = (group.leader for group in groups if not group.child.deleting)
    return [pod for pod in leaders if pod is not None and pod.node and pod.deadline is None]


def _told(pod: PodView, topology: Topology) -> Place | None:
    """Return what stands on a pod, if it is about these levels."""
    found = Place.from_json(pod.place)
    return found if found is not None and len(found.path) == len(topology.levels) else None
