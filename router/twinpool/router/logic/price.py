"""The price of giving a request to a worker: the waiting that it causes, its own and everybody else's, in seconds.

Everything is in one currency, so nothing needs a threshold: a cached prefix is worth the prefill that it saves, a queue
costs its length, work added to a busy worker costs those behind it, a pull costs its transfer. Prefilling on the decode
worker is one more option, taken when it is cheaper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from twinpool.router.logic import policy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from twinpool.core.economics import Prices
    from twinpool.router.logic.policy import Ask, Candidate

#: How many requests a second of work holds up for each one that waits per worker now: those that are there, and those
#: that come until the queue is worked off, which are the more the longer it is. Near saturation hits decide everything.
#: Chosen among 0 to 8 in simulation, on samples of the traces that no benchmark uses.
_BEHIND = 8.0


#: What a second of waiting beyond the objective is worth beside one before it. Chosen in the same way.
_LATE = 0.1


class Choice(msgspec.Struct, frozen=True):
    """A worker (its place among the candidates), the price, and the request's own expected time to first token."""

    place: int
    price: float
    ttft: float


class Decision(msgspec.Struct, frozen=True):
    """Where a request is prefilled: ``prefill`` is None when the decode worker does it. ``saved`` is in seconds."""

    prefill: Choice | None
    saved: float


def queueing(candidates: Sequence[Candidate]) -> float:
    """Return how many others each second of new work will hold up: g of ``backlog + (1 + g) x prefill``."""
    waiting = sum(max(0, candidate.requests - 1) for candidate in candidates)
    return _BEHIND * waiting / len(candidates)


def prefill_prices(ask: Ask, candidates: Sequence[Candidate], prices: Prices) -> list[float]:
    """Return the price of each prefill worker: its backlog, and the request's own work as often as it is waited for."""
    weight = 1.0 + queueing(candidates)
    return [
        candidate.backlog
        + candidate.load
        + weight * candidate.pace * prices.warm(ask.prompt, candidate.cached, candidate.held)
        for candidate in candidates
    ]


def at_stake(ask: Ask, candidates: Sequence[Candidate], prices: Prices, caches: Sequence[int]) -> float:
    """Return how much lower the least price could be if it were known what workers hold; 0 where that changes nothing.

    ``caches`` are those of each worker of which that can be known. At stake is what another cache than that of the
    cheapest worker would save, if all of the prompt were in it.
    """
    weight = 1.0 + queueing(candidates)
    whole = prices.warm(ask.prompt, ask.prompt - 1, ask.prompt - 1)
    costs = prefill_prices(ask, candidates, prices)
    now = min(costs)
    chosen = costs.index(now)
    others = [
        one.backlog + one.load + weight * one.pace * whole
        for place, one in enumerate(candidates)
        if caches[place] > (place == chosen)
    ]
    return max(0.0, now - min(others, default=now))


def lateness(ask: Ask, candidates: Sequence[Candidate], prices: Prices, ttft: float) -> list[float]:
    """Return how much less than its price each prefill worker is to be judged by, ``ttft`` being the objective.

    What a request waits beyond its objective is worth little, as it has missed it already, and work that is saved lets
    others meet theirs. Only waiting is judged so: the request's own work costs what it costs.
    """
    least = min(prices.warm(ask.prompt, candidate.cached, candidate.held) for candidate in candidates)
    left = max(0.0, ttft - prices.pull(ask.prompt) - least)
    return [(1.0 - _LATE) * max(0.0, candidate.backlog - left) for candidate in candidates]


def cheapest_prefill(
    ask: Ask,
    candidates: Sequence[Candidate],
    prices: Prices,
    rng: Random,
    ttft: float | None = None,
    last: int | None = None,
) -> Choice:
    """Choose the prefill worker; ``ttft`` is the objective for the first token in seconds, if there is one.

    ``last`` is the place that wins a tie, here and below: that of the session's last worker.
    """
    costs = prefill_prices(ask, candidates, prices)
    judged = costs
    if ttft is not None and max(candidate.backlog for candidate in candidates) > 0:
        judged = [cost - late for cost, late in zip(costs, lateness(ask, candidates, prices, ttft), strict=True)]
    place = policy.least(judged, rng, last)
    chosen = candidates[place]
    own = chosen.load + chosen.pace * prices.warm(ask.prompt, chosen.cached, chosen.held)
    return Choice(place, costs[place], chosen.backlog + own)


def decode_price(ask: Ask, candidate: Candidate, prices: Prices) -> float:
    """Return the price of writing the answer on a worker once the KV is there, without the pull.

    The wait for KV room, the answer's own steps, and what each of them adds to the steps of all that run there.
    """
    before = prices.step(candidate.requests, candidate.tokens)
    after = prices.step(candidate.requests + 1, candidate.tokens + ask.prompt + ask.output / 2)
    return _written(ask, candidate, before, after)


def _written(ask: Ask, candidate: Candidate, before: float, after: float) -> float:
    """See :func:`decode_price`; ``before`` and ``after`` are the worker's steps without and with the answer."""
    requests, tokens, room = candidate.requests, candidate.tokens, 0.0
    if candidate.capacity and tokens:
        missing = tokens + ask.prompt + ask.output - candidate.capacity
        if missing > 0:
            # All that runs is gone after about one answer's time, and its room with it, evenly.
            room = missing / tokens * ask.output * before
    return room + ask.output * (after + requests * (after - before))


def cheapest_decode(
    ask: Ask, candidates: Sequence[Candidate], prices: Prices, rng: Random, last: int | None = None
) -> Choice:
    """Choose the decode worker for a request that was prefilled elsewhere."""
    pulls = [prices.pull((ask.prompt - one.cached) * one.far) + one.load for one in candidates]
    costs = [decode_price(ask, one, prices) + pull for one, pull in zip(candidates, pulls, strict=True)]
    place = policy.least(costs, rng, last)
    chosen = candidates[place]
    return Choice(place, costs[place], pulls[place] + prices.step(chosen.requests + 1, chosen.tokens + ask.prompt))


def cheapest_whole(
    ask: Ask, candidates: Sequence[Candidate], prices: Prices, rng: Random, last: int | None = None
) -> Choice:
    """Choose the decode worker that does the prefill too, at the expense of the sequences that it runs."""
    costs, first = [], []
    prompt, more = ask.prompt, ask.prompt + ask.output / 2
    for one in candidates:
        cached, requests = one.cached, one.requests
        prefill, held_up, before, after = prices.whole(prompt - cached, cached, requests, one.tokens, more)
        if one.held > cached:
            prefill = prices.warm(prompt, cached, one.held)
        own = one.backlog + one.load + one.pace * prefill
        costs.append(own + requests * held_up + _written(ask, one, before, after))
        first.append(own)
    place = policy.least(costs, rng, last)
    return Choice(place, costs[place], first[place])


def decide(
    ask: Ask,
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    prices: Prices,
    rng: Random,
    ttft: float | None = None,
    seen_from: Callable[[int], Sequence[Candidate]] | None = None,
) -> Decision:
    """Decide between handing off and prefilling on the decode worker; neither list may be empty.

    The decode worker itself is chosen when it is needed, by the load of that moment. ``seen_from`` gives ``decodes`` as
    a prefill worker sees them, by its place, where they are not equally far from all.
    """
    remote = cheapest_prefill(ask, prefills, prices, rng, ttft)
    pairs = decodes if seen_from is None else seen_from(remote.place)
    handed = remote.price + cheapest_decode(ask, pairs, prices, rng).price
    whole = cheapest_whole(ask, decodes, prices, rng).price
    return Decision(remote, whole - handed) if handed < whole else Decision(None, handed - whole)
