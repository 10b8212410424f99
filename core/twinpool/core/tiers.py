"""Whether to load what a slower tier holds of a prompt, or to compute it. Pure arithmetic, standard library only.

A prompt's cached beginning may lie on several tiers, one after the other. Loading takes time for each token, computing
takes more for each the more stand before it: so the choice is made for each request and chunk by chunk, as the point up
to which is loaded (the rule ``T_load + T_prefill(rest) < T_prefill(all)`` of Mooncake, FAST'25, equation 2, at every
chunk). Always true: what is chosen takes no longer than loading everything, nor than loading nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twinpool.core.economics import Prices

#: What tiers are assumed to reach until they are measured: half of PCIe 5.0 x16 (64 GB/s), one NVMe drive, a file
#: server over 25 Gbit/s; and the seconds before the first byte.
ASSUMED_BANDWIDTH: dict[str, float] = {"host": 32e9, "disk": 4e9, "shared": 2e9}
ASSUMED_SETUP: dict[str, float] = {"host": 0.0005, "disk": 0.001, "shared": 0.003}

#: Tokens between two points at which loading may stop; LMCache moves as many at a time.
CHUNK = 256
#: Most tokens for which :func:`pays_from` looks for a gain.
_LONGEST = 2**17


@dataclass(frozen=True, slots=True)
class TierPrice:
    """What loading costs: seconds before the first token, and seconds for each one."""

    setup: float
    token: float


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tokens of a prompt that lie on one tier."""

    tokens: int
    price: TierPrice


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens to load after those on the accelerator, and the seconds of loading and of the whole prompt."""

    tokens: int
    load_seconds: float
    seconds: float


def plan(prices: Prices, prompt: int, device: int, runs: Sequence[Run], chunk: int = CHUNK) -> Plan:
    """Return what to load of a prompt of ``prompt`` tokens, of which the accelerator has the first ``device``.

    ``runs`` are what follows those, in order; at least one token is left to compute.
    """
    best = Plan(0, 0.0, prices.prefill(prompt - device, device))
    for tokens, load in _points(runs, chunk):
        if device + tokens >= prompt:
            break
        seconds = load + prices.prefill(prompt - device - tokens, device + tokens)
        if seconds < best.seconds:
            best = Plan(tokens, load, seconds)
    return best


def _points(runs: Sequence[Run], chunk: int) -> Iterator[tuple[int, float]]:
    """Yield every point at which loading may stop: the tokens loaded until there, and the seconds."""
    tokens, load = 0, 0.0
    for run in runs:
        load += run.price.setup
        for part in (*range(chunk, run.tokens, chunk), run.tokens):
            yield tokens + part, load + run.price.token * part
        tokens += run.tokens
        load += run.price.token * run.tokens


def load_seconds(runs: Sequence[Run]) -> float:
    """Return the seconds of loading all of it."""
    return sum(run.price.setup + run.price.token * run.tokens for run in runs)


def pays_from(prices: Prices, price: TierPrice) -> int | None:
    """Return the tokens from which on loading a whole prompt's beginning beats computing it; None when it never does.

    For an engine that does nothing else: beside other prompts of the same step, computing costs less.
    """
    tokens = CHUNK
    while tokens <= _LONGEST:
        if price.setup + price.token * tokens < prices.prefill(tokens, 0) - prices.overhead:
            return tokens
        tokens *= 2
    return None
