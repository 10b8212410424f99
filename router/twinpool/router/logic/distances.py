"""How long a pull takes beside what is assumed, for each pair of workers: by the links that they share.

Only of workers whose places the operator told (:mod:`twinpool.core.distance`). Always true: a pair of which nothing is
known is as far apart as the model assumes, and nobody is more than :data:`MOST` times nearer or farther: what lies
beyond says more of a measurement than of a network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twinpool.core.distance import bandwidth
from twinpool.core.timing import Link

if TYPE_CHECKING:
    from collections.abc import Container

    from twinpool.router.logic.endpoints import Endpoint

#: The link of the prices that are assumed of workers about which nothing is known.
ASSUMED_BANDWIDTH: Final = Link().bandwidth
MOST: Final = 16.0


def far(one: Endpoint, other: Endpoint) -> float:
    """Return by how much longer a byte takes between two workers than over the assumed link."""
    if one.place is None or other.place is None:
        return 1.0
    found = bandwidth(one.place, other.place)
    return 1.0 if found is None else min(MOST, max(1 / MOST, ASSUMED_BANDWIDTH / found))


class Distances:
    """Those of pairs that were asked for, by the ids of their endpoints."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[Endpoint, Endpoint, float]] = {}

    def far(self, one: Endpoint, other: Endpoint) -> float:
        """Return what :func:`far` says; it is only found anew when one of them has changed."""
        known = self._known.get((one.id, other.id))
        if known is not None and known[0] is one and known[1] is other:
            return known[2]
        found = far(one, other)
        self._known[one.id, other.id] = one, other, found
        return found

    def keep(self, known: Container[str]) -> None:
        """Forget workers that are gone."""
        self._known = {pair: found for pair, found in self._known.items() if pair[0] in known and pair[1] in known}
