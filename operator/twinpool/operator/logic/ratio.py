"""How many groups each role should have: what the spec says, with prefill moved into the ``ratio`` band.

A pool with ``scaling`` has a target instead (:mod:`twinpool.operator.logic.target`).
"""

from __future__ import annotations

from math import ceil, floor
from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.target import target

if TYPE_CHECKING:
    from twinpool.core.ratio import Ratio
    from twinpool.core.spec import InferencePool


def wanted(pool: InferencePool) -> dict[str, int]:
    """Return the groups that each role of the pool should have."""
    if pool.spec.scaling is not None and pool.spec.prefill is not None:
        return dict(zip(protocol.ROLES, target(pool, pool.spec.scaling), strict=True))
    counts = {name: role.replicas for name, role in names.roles(pool).items()}
    if pool.spec.ratio is not None and "prefill" in counts:
        counts["prefill"] = nearest(counts["prefill"], counts["decode"], pool.spec.ratio)
    return counts


def nearest(prefill: int, decode: int, band: Ratio) -> int:
    """Return the number of prefill groups nearest to ``prefill`` that keeps the band with ``decode`` groups.

    Where no whole number is in the band (three decode groups at exactly 1:2), it is the nearest to the band, the larger
    of two, and never 0 while there is decode.
    """
    low, high = (share * decode for share in band.fractions)
    least, most = ceil(low), floor(high)
    if least > most:
        below, above = max(most, min(1, decode)), least
        return below if low - below < above - high else above
    return min(max(prefill, least), most)
