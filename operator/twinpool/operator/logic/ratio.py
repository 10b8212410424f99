"""How many groups each role should have: what the spec says, with prefill moved into the ``ratio`` band."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor
from typing import TYPE_CHECKING

from twinpool.operator.logic import names

if TYPE_CHECKING:
    from twinpool.core.ratio import Ratio
    from twinpool.core.spec import InferencePool


def wanted(pool: InferencePool) -> dict[str, int]:
    """Return the groups that each role of the pool should have."""
    counts = {name: role.replicas for name, role in names.roles(pool).items()}
    if pool.spec.ratio is not None and "prefill" in counts:
        counts["prefill"] = nearest(counts["prefill"], counts["decode"], pool.spec.ratio)
    return counts


def nearest(prefill: int, decode: int, band: Ratio) -> int:
    """Return the number of prefill groups nearest to ``prefill`` that keeps the band with ``decode`` groups.

    Where no whole number is in the band (three decode groups at exactly 1:2), it is the nearest to the band, the larger
    of two, and never 0 while there is decode.
    """
    low, high = _fraction(band.min) * decode, _fraction(band.max) * decode
    least, most = ceil(low), floor(high)
    if least > most:
        below, above = max(most, min(1, decode)), least
        return below if low - below < above - high else above
    return min(max(prefill, least), most)


def _fraction(text: str) -> Fraction:
    prefill, decode = text.split(":")
    return Fraction(int(prefill), int(decode))
