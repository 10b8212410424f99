"""From the routers' reports to the work of one pool: what arrived within the last while, and whether that grew.

Routers count since their start; differences between two looks are what came in between, whichever router restarted,
joined or was silent for a moment. Always true: without an answer of every serving router for :data:`STALE` seconds
there are no figures, since work that nobody reports would look like no work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from twinpool.operator.logic.scaling_report import Totals
from twinpool.operator.logic.trend import step_at

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from twinpool.operator.logic.scaling_report import Work

#: Seconds after which the last answer of a router says nothing of the present.
STALE = 10.0
#: Looks that are kept for one pool.
MOST = 256
#: Share of the window that must be seen before anything is concluded.
_SEEN = 0.25
#: Standard deviations by which the newer half of the window must exceed the older one to count as growth.
_SURE = 3.0
#: Seconds after a step from which a rate is taken at least.
_SETTLED = 10.0


@dataclass(frozen=True, slots=True)
class Look:
    """The answers of all routers that gave one at ``at`` (seconds since 1970), by name of their pods."""

    at: float
    work: Mapping[str, Work]


@dataclass(frozen=True, slots=True)
class Window:
    """Work of a pool. ``totals`` came within ``seconds``; the rest is means over the looks, or of the last one.

    ``slope`` is by how many requests/s the rate grew per second, 0 where that may be chance. ``dispersion`` is the
    variance of the arrivals over their mean (1: Poisson), as far as it is certain.
    """

    seconds: float
    totals: Totals
    slope: float = 0.0
    dispersion: float = 1.0
    waiting: int = 0
    prefill: float = 0.0
    decoding: float = 0.0
    #: Tokens whose KV every decode worker can hold; 0: not known.
    kv_tokens: int = 0

    @property
    def asked(self) -> bool:
        """Return whether anybody wants anything."""
        return bool(self.totals.requests or self.waiting or self.decoding)


def remembered(looks: Sequence[Look], look: Look, length: float) -> tuple[Look, ...]:
    """Return the looks with one more, without those that are older than ``length`` seconds before it."""
    return (*(old for old in looks if old.at >= look.at - length - STALE), look)[-MOST:]


def window(looks: Sequence[Look], serving: Collection[str], now: float, length: float) -> Window | str:
    """Return the work of the last ``length`` seconds, or in words why it is not known."""
    if not serving:
        return "no router pod is ready, and only routers know what arrives"
    heard = {name for look in looks if look.at >= now - STALE for name in look.work}
    if silent := sorted(set(serving) - heard):
        return (
            f"router pod {silent[0]} does not say what arrives; look at its log, and whether a NetworkPolicy keeps the "
            "operator from its port 8081"
        )
    begin = max(now - length, looks[0].at)
    pieces = [piece for piece in _pieces(looks) if piece[1] > begin]
    covered = looks[-1].at - begin
    if not pieces or covered < _SEEN * length:
        return f"the work of the last {length:g} s is not known yet: the operator or the routers have just begun"
    recent = [look for look in looks if look.at > begin]
    return _judged(pieces, recent, covered)


_Piece = tuple[float, float, Totals]


def _pieces(looks: Sequence[Look]) -> list[_Piece]:
    """Return what came between each look and the next one, with the times of both."""
    last = dict(looks[0].work)
    found = []
    for before, look in pairwise(looks):
        came = [work.totals.since(last[name].totals) for name, work in look.work.items() if name in last]
        last |= look.work
        found.append((before.at, look.at, _sum(came)))
    return found


def _sum(several: Sequence[Totals]) -> Totals:
    return reduce(Totals.plus, several, Totals())


def _judged(pieces: Sequence[_Piece], recent: Sequence[Look], covered: float) -> Window:
    middle = recent[-1].at - covered / 2
    older = [piece for piece in pieces if piece[1] <= middle]
    newer = [piece for piece in pieces if piece[1] > middle]
    slope, kept = 0.0, pieces
    if older and newer:
        (first, first_seconds), (second, second_seconds) = _both(older), _both(newer)
        slope = _surely_more(first.requests, first_seconds, second.requests, second_seconds) / (covered / 2)
        spread = first.prefill_squared / first_seconds**2 + second.prefill_squared / second_seconds**2
        more = second.prefill / second_seconds - first.prefill / first_seconds
        if slope > 0 or more > _SURE * math.sqrt(spread):
            kept = newer
        if slope > 0 and (place := step_at([(end - begin, came.requests) for begin, end, came in pieces])) is not None:
            slope, kept = 0.0, _long_enough(pieces, place)
    totals, seconds = _both(kept)
    return Window(
        seconds,
        totals,
        slope,
        _dispersion(kept),
        waiting=sum(work.waiting for work in recent[-1].work.values()),
        prefill=sum(work.prefill for work in recent[-1].work.values()),
        decoding=fmean(sum(work.decoding for work in look.work.values()) for look in recent),
        kv_tokens=min((work.kv_tokens for work in recent[-1].work.values() if work.kv_tokens), default=0),
    )


def _long_enough(pieces: Sequence[_Piece], place: int) -> Sequence[_Piece]:
    """Return the pieces from ``place`` on, and as many before it as a mean takes."""
    while place > 0 and pieces[-1][1] - pieces[place][0] < _SETTLED:
        place -= 1
    return pieces[place:]


def _both(pieces: Sequence[_Piece]) -> tuple[Totals, float]:
    return _sum([piece[2] for piece in pieces]), max(1e-3, sum(end - begin for begin, end, _ in pieces))


def _surely_more(before: float, seconds: float, after: float, later: float) -> float:
    """Return by how much a rate grew, 0 unless that is more than chance would do to Poisson arrivals."""
    more = after / later - before / seconds
    return more if more > _SURE * math.sqrt(before / seconds**2 + after / later**2) else 0.0


def _dispersion(pieces: Sequence[_Piece]) -> float:
    """Return the variance of the arrivals over their mean, at the lower end of its confidence interval; at least 1."""
    rate = sum(piece[2].requests for piece in pieces) / max(1e-3, sum(end - begin for begin, end, _ in pieces))
    if len(pieces) < 3 or rate <= 0:
        return 1.0
    spread = fmean(
        (came.requests - rate * (end - begin)) ** 2 / (rate * max(1e-3, end - begin)) for begin, end, came in pieces
    )
    return max(1.0, spread * (1 - 2 * math.sqrt(2 / len(pieces))))
