"""How many groups of each role the work that arrives needs: queueing for prefill, batches for decode. Pure.

Sized from what arrives at the routers, never from what comes out: a saturated stage lets less through, and would seem
to need less. Always true: more work never needs fewer groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from twinpool.core.queueing import wait_exceeds

if TYPE_CHECKING:
    from twinpool.core.economics import Prices

#: Use of a link beyond which waiting for it grows out of proportion: at 0.6 two mean transfers, at 0.8 five and a half
#: (Pollaczek and Khinchine with the lengths of Mooncake's conversations). From the first on it is said, from the second
#: on groups are added.
LINK_WARN, LINK_USE = 0.6, 0.7


@dataclass(frozen=True, slots=True)
class Demand:
    """Work arriving, over all routers. Means per request; times in seconds, sizes in tokens.

    Parameters
    ----------
    rate:
        Requests per second.
    prefill:
        Prefill of the tokens that are not cached, by the prices.
    prefill_variation, arrival_variation:
        Squared coefficients of variation of that work, and of the time between arrivals.
    long_prefill:
        Prefill of a long prompt (the 90th percentile): what it leaves of the promise is the wait that all may have.
    prompt, output:
        Tokens read and written.
    backlog:
        Prefill that waits already, over all workers.
    flying:
        Sequences that are being written, as seen: more than foreseen when answers are longer than those that ended.
    """

    rate: float
    prefill: float
    prompt: float
    output: float
    long_prefill: float
    prefill_variation: float = 1.0
    arrival_variation: float = 1.0
    backlog: float = 0.0
    flying: float = 0.0

    def times(self, factor: float) -> Demand:
        """Return ``factor`` times as many requests of the same kind."""
        return replace(self, rate=self.rate * factor)


@dataclass(frozen=True, slots=True)
class Promise:
    """What users are promised: seconds, and the share of requests that may miss it."""

    ttft: float
    itl: float
    miss: float = 0.01


@dataclass(frozen=True, slots=True)
class Group:
    """What one decode group can hold: KV tokens and sequences. ``drain``: seconds within which a backlog must go."""

    kv_tokens: int
    sequences: int = 256
    drain: float = 60.0


@dataclass(frozen=True, slots=True)
class Need:
    """Fewest groups that keep a promise; infinite where no number does. ``batch``: sequences of a full decode group.

    ``links``: how many links of one group the pulls would keep busy all the time, on each side.
    """

    prefill: float
    decode: float
    batch: int
    links: float = 0.0


def need(demand: Demand, prices: Prices, promise: Promise, group: Group) -> Need:
    """Return the groups that ``demand`` needs."""
    batch = largest_batch(demand, prices, promise.itl, group)
    links = demand.rate * prices.pull(demand.prompt)
    return Need(
        prefill=max(_prefill(demand, prices, promise, group), math.ceil(links / LINK_USE)),
        decode=max(_decode(demand, prices, promise, batch), math.ceil(links / LINK_USE)),
        batch=batch,
        links=links,
    )


def largest_batch(demand: Demand, prices: Prices, itl: float, group: Group) -> int:
    """Return the most sequences that a decode group may run: within its KV room, and each step within ``itl``."""
    context = demand.prompt + demand.output / 2
    low, high = 0, min(group.sequences, int(group.kv_tokens // max(1.0, demand.prompt + demand.output)))
    while low < high:
        middle = (low + high + 1) // 2
        if prices.step(middle, middle * context) <= itl:
            low = middle
        else:
            high = middle - 1
    return low


def suffering(demand: Demand, prices: Prices, promise: Promise, group: Group, pair: tuple[int, int]) -> tuple[str, str]:
    """Return in words how ``pair`` groups break the promise at this moment, for prefill and for decode; else empty."""
    prefill, decode = pair
    waits = writes = ""
    if prefill and demand.backlog:
        first = demand.backlog / prefill + demand.prefill + prices.pull(demand.prompt) + prices.step(1, demand.prompt)
        if first > promise.ttft:
            waits = f"{demand.backlog:.3g} s of prefill wait for {prefill} groups"
    if decode and demand.flying:
        batch = demand.flying / decode
        step = prices.step(batch, batch * (demand.prompt + demand.output / 2))
        if batch > group.sequences or step > promise.itl:
            writes = f"{demand.flying:.3g} sequences are written by {decode} groups"
    return waits, writes


def _prefill(demand: Demand, prices: Prices, promise: Promise, group: Group) -> float:
    """Return the least c at which M/G/c lets a wait beyond what the promise leaves happen no more often than it may."""
    if demand.rate <= 0 or demand.prefill <= 0:
        return math.ceil(demand.backlog / group.drain)
    left = promise.ttft - demand.long_prefill - prices.pull(demand.prompt) - prices.step(1, demand.prompt)
    if left <= 0:
        return math.inf
    # A backlog is work that arrives within the time in which it must go.
    rate = demand.rate + demand.backlog / group.drain / demand.prefill

    def enough(servers: int) -> bool:
        variation = (demand.arrival_variation, demand.prefill_variation)
        return wait_exceeds(left, servers, rate, demand.prefill, *variation) <= promise.miss

    most = 1
    while not enough(most):
        most *= 2
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if enough(middle) else (middle, most)
    return most


def _decode(demand: Demand, prices: Prices, promise: Promise, batch: int) -> float:
    """Return the least number of batches that hold the sequences in flight, but for the share that may miss.

    Little's law gives their mean; their spread is its square root times that of the arrivals (square-root staffing with
    the peakedness of the arrivals; Whitt, 1992).
    """
    step = prices.step(batch, batch * (demand.prompt + demand.output / 2))
    flying = max(demand.flying, demand.rate * demand.output * step)
    if flying <= 0 and demand.rate <= 0:
        return 0
    if batch < 1:
        return math.inf
    peakedness = (1 + demand.arrival_variation) / 2
    margin = NormalDist().inv_cdf(1 - promise.miss)
    return max(1, math.ceil((flying + margin * math.sqrt(flying * peakedness)) / batch))
