"""KV tiers behind the accelerator's blocks: what each holds, what gives way, and how long loading takes. Pure.

As vLLM's offloading: every full block goes to the host's memory, and from there on to each further tier; what a
further tier holds comes back through the host. Each tier forgets the least recently used. Always true: no tier holds
more than its blocks; what is loaded was held.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from twinpool.core.tiers import Plan, Run, TierPrice, load_seconds, plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.core.economics import Prices

#: ``always``: what is found is loaded, as vLLM 0.32 does; ``priced``: only as far as that is faster than computing.
Loading = Literal["always", "priced"]
Kind = Literal["host", "disk", "shared"]
#: In the order in which blocks go through them.
KINDS: tuple[Kind, ...] = get_args(Kind)
#: vLLM's ``CacheHitSource`` of each kind of tier; a shared folder is a disk to it.
SOURCES = {"host": "host", "disk": "disk", "shared": "disk"}


@dataclass(frozen=True, slots=True)
class TierSettings:
    """One tier: its kind, the blocks it has room for, seconds before a load, and bytes/s."""

    kind: Kind
    blocks: int
    setup: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Load:
    """What is loaded for a prompt: blocks from each tier in the order of the prompt, and the seconds it takes."""

    runs: tuple[tuple[int, int], ...]
    seconds: float

    @property
    def blocks(self) -> int:
        """Return the blocks of all runs."""
        return sum(count for _, count in self.runs)


NOTHING = Load((), 0.0)


class Tiers:
    """The tiers of one engine; ``block_bytes`` of KV and ``block_size`` tokens make a block."""

    def __init__(
        self,
        settings: Sequence[TierSettings] = (),
        loading: Loading = "always",
        *,
        prices: Prices | None = None,
        block_size: int = 16,
        block_bytes: int = 0,
    ) -> None:
        self.settings = tuple(settings)
        self.block_size, self.block_bytes = block_size, block_bytes
        self._prices = prices if loading == "priced" else None
        self._held: tuple[OrderedDict[int, None], ...] = tuple(OrderedDict() for _ in self.settings)
        #: Blocks that gave way, by tier.
        self.evicted = [0] * len(self.settings)
        #: The link of a tier serves one load after the other: when it is free again.
        self._free = [0.0] * len(self.settings)

    def __len__(self) -> int:
        return len(self.settings)

    def blocks(self, tier: int) -> int:
        """Return how many blocks a tier holds."""
        return len(self._held[tier])

    def label(self, tier: int) -> str:
        """Return vLLM's name of a tier in its metrics."""
        return f"{tier}:fs" if tier else "0:primary"

    def price(self, tier: int) -> TierPrice:
        """Return what a token of a tier costs; further tiers go through the first one."""
        passed = {0, tier}
        token = sum(self.block_bytes / self.block_size / self.settings[each].bandwidth for each in passed)
        return TierPrice(sum(self.settings[each].setup for each in passed), token)

    def store(self, hashes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Keep blocks that were computed; return those that are new to the host's memory, and those that left it.

        A block that came and went in the meantime, or went and came, is neither.
        """
        if not self._held:
            return [], []
        host = self._held[0]
        before = {value for value in hashes if value in host}
        gone: list[int] = []
        for value in hashes:
            for tier, held in enumerate(self._held):
                if value in held:
                    held.move_to_end(value)
                    continue
                left = self._put(tier, value)
                gone += () if tier else left
        new = set(hashes) - before
        came = [value for value in dict.fromkeys(hashes) if value in new and value in host]
        return came, [value for value in dict.fromkeys(gone) if value not in host and value not in new]

    def _put(self, tier: int, value: int) -> list[int]:
        held, gone = self._held[tier], []
        held[value] = None
        while len(held) > self.settings[tier].blocks:
            gone.append(held.popitem(last=False)[0])
        self.evicted[tier] += len(gone)
        return gone

    def find(self, hashes: Sequence[int]) -> list[int]:
        """Return, for the longest beginning of ``hashes`` that is held, the fastest tier that holds each block."""
        found = []
        for value in hashes:
            tier = next((tier for tier, held in enumerate(self._held) if value in held), None)
            if tier is None:
                break
            found.append(tier)
        return found

    def choose(self, prompt: int, device: int, found: Sequence[int], now: float) -> Load:
        """Return what to load of a prompt whose first ``device`` tokens the accelerator has.

        ``found`` are the tiers of the blocks after those. A load waits until the links of its tiers are free.
        """
        runs = _runs(found)
        priced = [Run(count * self.block_size, self.price(tier)) for tier, count in runs]
        wait = max((self._free[tier] - now for tier, _ in runs), default=0.0)
        load = load_seconds(priced)
        if self._prices is not None and runs:
            chunk = max(1, 256 // self.block_size) * self.block_size
            delayed = [Run(run.tokens, TierPrice(run.price.setup + max(0.0, wait), run.price.token)) for run in priced]
            best: Plan = plan(self._prices, prompt, device, delayed, chunk)
            runs = _runs(found[: best.tokens // self.block_size])
            load = load_seconds([Run(count * self.block_size, self.price(tier)) for tier, count in runs])
        return Load(tuple(runs), load + max(0.0, wait)) if runs else NOTHING

    def begin(self, load: Load, hashes: Sequence[int], now: float) -> tuple[list[int], list[int]]:
        """Begin a load: its tiers' links are taken until it ends, and what comes from further tiers is in the host.

        Returns what :meth:`store` does.
        """
        for tier, _ in load.runs:
            self._free[tier] = now + load.seconds
        return self.store(hashes)


def _runs(found: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for tier in found:
        if runs and runs[-1][0] == tier:
            runs[-1] = (tier, runs[-1][1] + 1)
        else:
            runs.append((tier, 1))
    return runs
