"""How many prefill and decode groups a pool should have: both numbers at once, from one need. Pure.

Always true: the pair is within bounds and GPU budget whenever any pair is, within the ratio band too whenever one is;
missing figures change nothing; more than the need is kept until a tenth more work would not need it either, and not
before every need of the last while allows it, so that noise moves nothing; nor does a group come before every need of
a shorter while asks for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.operator.logic.scaling_need import LINK_WARN, need

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from fractions import Fraction

    from twinpool.core.economics import Prices
    from twinpool.operator.logic.scaling_need import Demand, Group, Need, Promise

#: A group goes only if this much more work would not need it.
_SPARE = 1.1

#: Prefill and decode groups; a need may be infinite.
Pair = tuple[int, int]
Needs = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of both roles, GPUs of one group of each, the GPUs that there are, and the band of prefill to decode."""

    prefill: tuple[int, int]
    decode: tuple[int, int]
    prefill_gpus: int = 1
    decode_gpus: int = 1
    budget: int | None = None
    band: tuple[Fraction, Fraction] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The numbers to have, and why. ``enough`` is False when no pair within the limits meets the need."""

    prefill: int
    decode: int
    reason: str
    enough: bool = True
    need: Need | None = None


def plan_scale(
    demand: Demand | None,
    prices: Prices,
    promise: Promise,
    group: Group,
    limits: Limits,
    current: Pair,
    recent: Sequence[Needs] = (),
    growth: float = 1.0,
    steady: Sequence[Needs] = (),
    late: Pair = (0, 0),
    spare: Pair = (0, 0),
) -> Decision:
    """Return how many groups of each role there should be.

    ``growth`` is by how much the demand may grow until a new group is up; ``recent`` are the needs of the last while,
    which is as long as scaling in is held back; ``steady`` are those of the while for which scaling out is. Of
    the current groups ``late`` are not counted on, and others are had in their place: as many as the rest at most, so
    that groups which never start bring no more than one. ``spare`` groups are had beyond the need in case that others
    are lost, as far as the limits leave room for them. Without ``demand`` the current numbers stay.
    """
    if demand is None:
        return Decision(*current, "no current figures of the arriving work: nothing is changed until there are")
    wanted = need(demand.times(growth), prices, promise, group)
    more = need(demand.times(growth * _SPARE), prices, promise, group)
    kept = (spare[0] if wanted.prefill else 0, spare[1] if wanted.decode else 0)
    broken = [min(few, max(1, have - few)) for have, few in zip(current, late, strict=True)]
    floors = partial(_floors, current, wanted, more, recent, steady)
    floor = floors((broken[0] + kept[0], broken[1] + kept[1]))
    prefill, decode = cheapest(floor, limits)
    if any(kept) and (prefill < floor[0] or decode < floor[1]):
        kept = 0, 0
        prefill, decode = cheapest(floors((broken[0], broken[1])), limits)
    now = _meets((prefill, decode), wanted)
    enough = now or _possible(wanted, limits)
    words = _reason(demand, wanted, (prefill, decode), enough, now)
    words += _full_links(wanted, prefill, decode) + _broken(broken) + _kept(kept)
    return Decision(prefill, decode, words, enough, wanted)


def _meets(pair: Pair, wanted: Need) -> bool:
    return pair[0] >= wanted.prefill and pair[1] >= wanted.decode


def _possible(wanted: Need, limits: Limits) -> bool:
    """Return whether any pair within the limits meets the need."""
    if math.isinf(wanted.prefill) or math.isinf(wanted.decode):
        return False
    return _meets(cheapest((int(wanted.prefill), int(wanted.decode)), limits), wanted)


def _broken(broken: Sequence[int]) -> str:
    """Return in words which groups are not counted on."""
    named = [f"{count} {role}" for count, role in zip(broken, protocol.ROLES, strict=True) if count]
    return f"; {' and '.join(named)} groups take longer to start than others and do not count" if named else ""


def _kept(kept: Pair) -> str:
    """Return in words which groups are there in case that others are lost."""
    named = [f"{count} {role}" for count, role in zip(kept, protocol.ROLES, strict=True) if count]
    return f"; {' and '.join(named)} more, since groups were lost lately" if named else ""


def _full_links(wanted: Need, prefill: int, decode: int) -> str:
    """Return in words how full the links of the role with fewer groups are, where pulls wait for each other."""
    fewest, role = min((prefill, "prefill"), (decode, "decode"))
    if fewest < 1 or wanted.links / fewest <= LINK_WARN:
        return ""
    return f"; the links of {fewest} {role} groups are {wanted.links / fewest:.0%} full, so pulls wait"


def _floors(
    current: Pair, wanted: Need, more: Need, recent: Sequence[Needs], steady: Sequence[Needs], extra: Pair
) -> Pair:
    """Return the numbers below which the roles must not go, ``extra`` groups beyond those that count included."""
    prefill, decode = (
        beside
        + _floor(max(0, have - beside), least, [most, *(pair[role] for pair in recent)], [p[role] for p in steady])
        for role, (have, beside, least, most) in enumerate(
            (
                (current[0], extra[0], wanted.prefill, more.prefill),
                (current[1], extra[1], wanted.decode, more.decode),
            )
        )
    )
    return prefill, decode


def _floor(current: int, least: float, held: Iterable[float], steady: Iterable[float]) -> int:
    """Return the number below which a role must not go: its need, and of what it has, what is held back.

    Beyond what it has, only as many as every need of the last while asked for. A need that no number meets holds what
    there is: neither fewer nor more groups would help.
    """
    if math.isinf(least):
        return current
    if least > current:
        return max(current, int(min([least, *steady])))
    return max(int(least), math.ceil(min(current, max(held))))


def cheapest(floors: Pair, limits: Limits) -> Pair:
    """Return the pair with the fewest GPUs that has at least ``floors``.

    Where there is none, the pair that comes closest: the one with the greatest min(prefill / floor, decode / floor),
    then with the fewest GPUs. A band or budget that leaves no pair at all gives way: first the band, then the budget.
    """
    best: tuple[float, int, int, int] | None = None
    for prefill in range(limits.prefill[0], limits.prefill[1] + 1):
        low, high = _decode_range(prefill, limits)
        if low > high:
            continue
        decode = min(high, max(low, _matching(prefill, floors)))
        gpus = prefill * limits.prefill_gpus + decode * limits.decode_gpus
        key = (-_share((prefill, decode), floors), gpus, prefill, decode)
        best = key if best is None else min(best, key)
    if best is not None:
        return best[2], best[3]
    if limits.band is not None:
        without = Limits(limits.prefill, limits.decode, limits.prefill_gpus, limits.decode_gpus, limits.budget)
        return cheapest(floors, without)
    return limits.prefill[0], limits.decode[0]


def _decode_range(prefill: int, limits: Limits) -> Pair:
    """Return the decode groups that bounds, band and budget allow beside ``prefill`` groups; empty when none."""
    low, high = limits.decode
    if limits.band is not None:
        least, most = limits.band
        low, high = max(low, math.ceil(prefill / most)), min(high, math.floor(prefill / least))
    if limits.budget is not None:
        high = min(high, (limits.budget - prefill * limits.prefill_gpus) // limits.decode_gpus)
    return low, high


def _matching(prefill: int, floors: Pair) -> int:
    """Return the decode groups that are as good as ``prefill`` is for its floor: more of them would win nothing."""
    if prefill >= floors[0]:
        return floors[1]
    return -(-floors[1] * prefill // floors[0])


def _share(pair: Pair, floors: Pair) -> float:
    """Return which share of the need a pair meets, at most 1."""
    shares = [have / floor for have, floor in zip(pair, floors, strict=True) if floor > 0]
    return min([1.0, *shares])


def _reason(demand: Demand, wanted: Need, pair: Pair, enough: bool, now: bool) -> str:
    work = f"{demand.rate:.3g} requests/s with {demand.prefill:.3g} s of prefill and {demand.output:.4g} tokens each"
    if math.isinf(wanted.prefill):
        return (
            f"{work}: one prefill alone takes longer than the objective for the first token; no number of groups helps"
        )
    if math.isinf(wanted.decode):
        return (
            f"{work}: one sequence alone misses the objective between tokens or the KV room; no number of groups helps"
        )
    need_text = f"{wanted.prefill:g} prefill and {wanted.decode:g} decode groups of {wanted.batch} sequences"
    if not enough:
        allowed = f"the limits allow {pair[0]} and {pair[1]}: raise the most groups or the GPU budget"
        return f"{work} need {need_text}; {allowed}"
    if not now:
        return f"{work} need {need_text}; not more than {pair[0]} and {pair[1]} for as long as scaleOut yet"
    return f"{work} need {need_text}"
