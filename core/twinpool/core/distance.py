"""How far two workers are from each other: what the operator writes on their pods, and what routers make of it.

Routers see pods, not nodes, so the operator, which knows the network's levels, says for each worker in which domains
its node lies and what the links of each level carry: what was measured, or else what was promised.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from twinpool.core.topology import (
    Path,
    shared,
)

if TYPE_CHECKING:
    from twinpool.core.topology import Topology


@dataclass(frozen=True, slots=True)
class Place:
    """A node's domain at each level from broad to narrow (None: not known), and the bytes/s of each level's links."""

    path: Path
    bandwidths: tuple[float, ...]

    def to_json(self) -> str:
        """Return the value of :data:`twinpool.core.protocol.ANNOTATION_PLACE`."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Place | None:
        """Read what :meth:`to_json` wrote; None for anything else, such as an annotation that is not there yet."""
        try:
            value = json.loads(text)
            path = tuple(None if domain is None else str(domain) for domain in value["path"])
            bandwidths = tuple(float(bandwidth) for bandwidth in value["bandwidths"])
        except (ValueError, TypeError, KeyError):
            return None
        usable = path and len(path) == len(bandwidths) and all(0 < bandwidth < float("inf") for bandwidth in bandwidths)
        return cls(path, bandwidths) if usable else None


def place(path: Path, topology: Topology) -> Place:
    """Return what is said of a node with this path; two digits of a bandwidth, so that medians may move a little."""
    return Place(path, tuple(float(f"{level.bandwidth:.1e}") for level in topology.levels))


def bandwidth(one: Place, other: Place) -> float | None:
    """Return the bytes/s of the links of the narrowest level that two workers share.

    The less of what is said of it: a pod may have been told earlier than another. None when both were told of networks
    with other levels.
    """
    if len(one.path) != len(other.path):
        return None
    level = shared(one.path, other.path)
    return min(one.bandwidths[level], other.bandwidths[level])
