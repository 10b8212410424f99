"""Slower memory behind the caches of simulated prefill groups: what it holds, and what loading it takes.

Blocks go to every tier when they are computed, as vLLM's offloading connector writes them. What is loaded, and what is
computed although a tier has it, is decided by the function that decides in production (``core/tiers.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.core.tiers import ASSUMED_BANDWIDTH, ASSUMED_SETUP, Run, TierPrice
from twinpool.simulate.cache import Cache
from twinpool.simulate.traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twinpool.core.kv_cache import KvTier, TierKind

#: What engines call them in their events.
MEDIUM: dict[TierKind, str] = {"host": "CPU", "disk": "DISK", "shared": "DISK"}


@dataclass(frozen=True, slots=True)
class TierSetup:
    """One tier of each group: its tokens, and what loading costs. A shared one is the same for all groups."""

    kind: TierKind
    tokens: int
    price: TierPrice


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of one group."""

    cache: Cache
    price: TierPrice


def setup_of(tier: KvTier, size: int, token_bytes: float) -> TierSetup:
    """Return a tier of ``size`` bytes for KV of ``token_bytes`` a token; all ways lead over the host's memory."""
    ways = dict.fromkeys(("host", tier.kind))
    price = TierPrice(
        sum(ASSUMED_SETUP[way] for way in ways), sum(token_bytes / ASSUMED_BANDWIDTH[way] for way in ways)
    )
    return TierSetup(tier.kind, int(size / token_bytes), price)


def tiers_for(
    setups: Sequence[TierSetup],
    shared: dict[str, Cache],
    listener: Callable[[str], Callable[[list[int], bool], None] | None],
) -> tuple[Tier, ...]:
    """Return the tiers of a new group; ``shared`` has those that all groups use, and gets what it lacks.

    ``listener``: who hears of the blocks of a medium. Of a shared tier nobody does: it is no worker's.
    """
    found = []
    for one in setups:
        blocks = one.tokens // BLOCK_TOKENS
        if one.kind == "shared":
            cache = shared.setdefault(one.kind, Cache(blocks))
        else:
            cache = Cache(blocks, listener(MEDIUM[one.kind]))
        found.append(Tier(cache, one.price))
    return tuple(found)


def runs(tiers: Sequence[Tier], blocks: Sequence[int], device: int) -> list[Run]:
    """Return what tiers hold of a prompt behind the first ``device`` blocks, each what those before it lack."""
    found, held = [], device
    for tier in tiers:
        more = tier.cache.leading(blocks[held:])
        if more > 0:
            found.append(Run(more * BLOCK_TOKENS, tier.price))
            held += more
    return found
