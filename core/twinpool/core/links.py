"""What the links of a network's levels carry: as the operator was told, or as preflights measured it.

Three sources, each better than the one before: data sheets and assumptions (:data:`twinpool.core.topology.LINKS`),
what somebody says of this network (``--links``), and what was measured between the ranks of groups that run. A
measurement counts as the median of at least :data:`AT_LEAST` pairs, so that one bad cable changes no level; it is taken
for at most :data:`FURTHEST` times more or less than was said: beyond that it tells more of itself than of the network.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from twinpool.core.errors import InvalidValue
from twinpool.core.topology import CLUSTER, NAMES, Topology
from twinpool.core.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LINKS_HELP = (
    "bytes/s of one GPU over the links of a level, perhaps with their latency, such as rack=25G@3us,host=32G "
    "(empty: data sheets)"
)
#: Pairs of ranks from which a level's median counts, and how far from what was said it may lie, as a factor.
AT_LEAST, FURTHEST = 3, 16.0

_LATENCY = re.compile(r"([1-9][0-9]{0,5})(ns|us|ms)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over ``pairs`` pairs of ranks whose narrowest common level is ``level``; bytes/s and seconds."""

    level: str
    pairs: int
    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class LevelLink:
    """The links of one level: what was said of them, what was measured (None: too little), and what counts."""

    level: str
    configured: float
    used: float
    measured: Measured | None = None


def with_links(topology: Topology, text: str) -> Topology:
    """Return the topology with the bandwidths and latencies that ``text`` names (``rack=25G@3us,host=32G``).

    A level that the topology does not have is taken and does nothing: one setting serves clusters of several kinds.

    Raises
    ------
    InvalidValue
        When a level is unknown, or a size or a latency cannot be read.
    """
    bandwidths: dict[str, float] = {}
    latencies: dict[str, float] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, rest = entry.partition("=")
        if name not in (CLUSTER, *NAMES) or not equals:
            raise InvalidValue(
                f"the link {entry!r} is not understood",
                f"write LEVEL=BYTES or LEVEL=BYTES@LATENCY; levels are {', '.join((CLUSTER, *NAMES))}",
            )
        size, at, delay = rest.partition("@")
        bandwidths[name] = float(parse_bytes(size))
        if at:
            latencies[name] = _latency(entry, delay)
    return _linked(topology, bandwidths, latencies)


def _latency(entry: str, text: str) -> float:
    match = _LATENCY.fullmatch(text)
    if match is None:
        raise InvalidValue(f"the latency of the link {entry!r} is not understood", "write 800ns, 3us or 1ms")
    return int(match[1]) * _SECONDS[match[2]]


def _linked(topology: Topology, bandwidths: Mapping[str, float], latencies: Mapping[str, float]) -> Topology:
    return Topology(
        tuple(
            replace(
                level,
                bandwidth=bandwidths.get(level.name, level.bandwidth),
                latency=latencies.get(level.name, level.latency),
            )
            for level in topology.levels
        )
    )


def combined(measured: Iterable[Measured]) -> dict[str, Measured]:
    """Return one measurement for each level: the medians of several, each weighted by its pairs."""
    found: dict[str, list[Measured]] = {}
    for item in measured:
        found.setdefault(item.level, []).append(item)
    return {
        level: Measured(
            level,
            sum(item.pairs for item in items),
            _middle([(item.bandwidth, item.pairs) for item in items]),
            _middle([(item.latency, item.pairs) for item in items]),
        )
        for level, items in sorted(found.items())
    }


def _middle(weighted: list[tuple[float, int]]) -> float:
    """Return the lower median of values that count several times each."""
    ordered = sorted(weighted)
    until = list(accumulate(weight for _, weight in ordered))
    return next(value for (value, _), reached in zip(ordered, until, strict=True) if 2 * reached >= until[-1])


def with_measured(topology: Topology, measured: Iterable[Measured]) -> Topology:
    """Return the topology with what was measured of its levels in place of what was said.

    Of a level that nobody measured no more is believed than of the next narrower one that was: what leaves a rack has
    gone over the rack's links before. So the broadest level stays the slowest, and prices keep their meaning.
    """
    usable = {item.level: item for item in combined(measured).values() if item.pairs >= AT_LEAST}
    levels = []
    most = float("inf")
    for level in reversed(topology.levels):
        found = usable.get(level.name)
        if found is None:
            levels.append(replace(level, bandwidth=min(level.bandwidth, most)))
            continue
        most = _bounded(found.bandwidth, level.bandwidth)
        levels.append(replace(level, bandwidth=most, latency=_bounded(found.latency, level.latency), measured=True))
    return Topology(tuple(reversed(levels)))


def _bounded(found: float, said: float) -> float:
    return min(max(found, said / FURTHEST), said * FURTHEST)


def level_links(topology: Topology, measured: Iterable[Measured]) -> list[LevelLink]:
    """Return what was said, what was measured and what counts, for each level from broad to narrow."""
    known = combined(measured)
    used = with_measured(topology, known.values())
    return [
        LevelLink(said.name, said.bandwidth, now.bandwidth, known.get(said.name))
        for said, now in zip(topology.levels, used.levels, strict=True)
    ]
