"""Published routing rules beside Twinpool's own: each chooses a prefill worker from the same view of the pool.

The rules of others are written anew from what their projects and papers publish, with their default constants, inside
one simulator: they rank ideas and say nothing about the named products. Sources: sglang's gateway (cache_aware),
llm-d's scheduler (prefix and queue scorers; affinity filter and token load), NVIDIA Dynamo's KV router, LMetric (arXiv
2603.15202), Mooncake (FAST'25, algorithm 1, without copying KV between prefill workers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.router.logic import policy, price

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from twinpool.core.economics import Prices
    from twinpool.router.logic.policy import Ask, Candidate


@dataclass(frozen=True, slots=True)
class Seen:
    """What a router sees when it chooses. ``uncached`` is the prompt tokens that each worker has yet to compute."""

    ask: Ask
    candidates: Sequence[Candidate]
    uncached: Sequence[float]
    prices: Prices
    turn: int
    rng: Random
    #: The pool's objective for the first token, in seconds.
    ttft: float | None = None


def random(seen: Seen) -> int:
    """Any worker."""
    return seen.rng.randrange(len(seen.candidates))


def round_robin(seen: Seen) -> int:
    """One after the other."""
    return policy.round_robin(len(seen.candidates), seen.turn)


def least_load(seen: Seen) -> int:
    """Fewest admitted tokens."""
    return policy.least_load([candidate.tokens for candidate in seen.candidates], seen.rng)


def prefix(seen: Seen) -> int:
    """Most cached tokens, then fewest admitted ones."""
    return policy.longest_prefix(seen.candidates, seen.rng)


def price_of_work(seen: Seen) -> int:
    """Least waiting caused, in seconds: Twinpool's ``price``."""
    return price.cheapest_prefill(seen.ask, seen.candidates, seen.prices, seen.rng, seen.ttft).place


def sglang(seen: Seen) -> int:
    """Longest prefix above a threshold, unless the fleet is out of balance (0.3, 64, 1.5)."""
    loads = [candidate.requests for candidate in seen.candidates]
    if max(loads) - min(loads) > 64 and max(loads) > 1.5 * min(loads):
        return policy.least_load(loads, seen.rng)
    best = max(range(len(loads)), key=lambda place: seen.candidates[place].cached)
    if seen.candidates[best].cached / seen.ask.prompt > 0.3:
        return best
    return policy.least_load(loads, seen.rng)


def llm_d(seen: Seen) -> int:
    """Two parts prefix score, one part queue score."""
    queues = [candidate.requests for candidate in seen.candidates]
    most, span = max(queues), max(queues) - min(queues)
    scores = [
        2 * candidate.cached / seen.ask.prompt + ((most - queue) / span if span else 1.0)
        for candidate, queue in zip(seen.candidates, queues, strict=True)
    ]
    return _best([-score for score in scores], seen.rng)


def llm_d_affinity(seen: Seen) -> int:
    """Workers that hold 80 % of the prompt unless that costs 18 s more than others; then fewest tokens to compute."""
    waits = [tokens * seen.prices.token for tokens in seen.uncached]
    places = range(len(waits))
    sticky = [place for place in places if seen.candidates[place].cached >= 0.8 * seen.ask.prompt]
    others = [place for place in places if place not in sticky]
    if sticky and others and min(waits[p] for p in sticky) - min(waits[p] for p in others) > 18.0:
        sticky = []
    chosen = sticky or list(places)
    return chosen[_best([seen.uncached[place] for place in chosen], seen.rng)]


def dynamo(seen: Seen) -> int:
    """Prefill blocks to compute, less the overlap (credit 1, temperature 0)."""
    costs = [
        max(0.0, tokens + seen.ask.prompt - candidate.cached)
        for candidate, tokens in zip(seen.candidates, seen.uncached, strict=True)
    ]
    return _best(costs, seen.rng)


def lmetric(seen: Seen) -> int:
    """Tokens to compute times requests there."""
    costs = [(seen.ask.prompt - candidate.cached) * (candidate.requests + 1) for candidate in seen.candidates]
    return _best(costs, seen.rng)


def mooncake(seen: Seen) -> int:
    """Least time to first token of this request alone."""
    costs = [
        candidate.backlog + seen.prices.prefill(seen.ask.prompt - candidate.cached, candidate.cached)
        for candidate in seen.candidates
    ]
    return _best(costs, seen.rng)


def _best(costs: Sequence[float], rng: Random) -> int:
    lowest = min(costs)
    places = [place for place, cost in enumerate(costs) if cost == lowest]
    return places[0] if len(places) == 1 else places[rng.randrange(len(places))]


#: By the names that tables use.
RULES: dict[str, Callable[[Seen], int]] = {
    "random": random,
    "round-robin": round_robin,
    "least-load": least_load,
    "prefix": prefix,
    "price": price_of_work,
    "sglang": sglang,
    "llm-d": llm_d,
    "llm-d affinity": llm_d_affinity,
    "dynamo": dynamo,
    "lmetric": lmetric,
    "mooncake": mooncake,
}
OURS = "price"
