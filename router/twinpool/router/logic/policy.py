"""Which of several workers gets the next request. Pure: the same inputs give the same choice, here and in simulation.

Five policies, from none to all of what is known: ``random``, ``round-robin``, ``least-load`` (fewest admitted tokens),
``prefix`` (most cached prompt tokens, then least load) and ``price`` (:mod:`twinpool.router.logic.price`: the least
waiting caused, in seconds). Always true: a choice is one of the candidates; equals are told apart at random, because
routers that all took the first one would send the next burst to the same worker.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence
    from random import Random

    from twinpool.core.protocol import Policy
    from twinpool.router.logic.endpoints import Endpoint

#: Policies that ask what workers hold of a prompt.
PREFIX_AWARE: frozenset[Policy] = frozenset({"prefix", "price"})

#: Costs this close to the least one are equal: predictions are not better than that.
_TIE = 1.05
#: Of more candidates than this only so many are looked at, drawn at random, or half of them because they hold the
#: longest prefixes: two random choices are nearly as good as all (Mitzenmacher, 2001), and what a request costs must
#: not grow with the pool.
MANY = 16


class Candidate(msgspec.Struct, frozen=True):
    """What a worker has to do already, and what it holds of the prompt in question. Tokens and seconds."""

    #: Admitted and not finished.
    requests: int = 0
    tokens: int = 0
    #: Prefill that it has yet to do.
    backlog: float = 0.0
    #: Leading prompt tokens in accelerator memory, and anywhere on the worker.
    cached: int = 0
    held: int = 0
    #: KV tokens that it can hold; 0: not known.
    capacity: int = 0
    #: How many times as long as others it takes to compute.
    pace: float = 1.0
    #: How many times as long as assumed a byte takes from the worker that has prefilled.
    far: float = 1.0
    #: Seconds in which it brings the request's adapter in.
    load: float = 0.0


class Ask(msgspec.Struct, frozen=True):
    """A request as far as choosing needs it: estimates in tokens."""

    prompt: int
    output: int


def round_robin(count: int, turn: int) -> int:
    """Return whose turn it is; ``turn`` counts the requests of a role."""
    # Each cycle starts one further on, or prefill i would for ever be paired with decode i.
    return (turn + turn // count) % count


def least(costs: Sequence[float], rng: Random, last: int | None = None) -> int:
    """Return the place of the least cost, one of those within 5 % of it at random, or ``last`` if that is among them.

    Costs must not be negative.
    """
    bound = min(costs) * _TIE
    if last is not None and costs[last] <= bound:
        return last
    best = [place for place, cost in enumerate(costs) if cost <= bound]
    return best[0] if len(best) == 1 else best[rng.randrange(len(best))]


def least_load(loads: Sequence[int], rng: Random) -> int:
    """Return the place of one with the fewest admitted tokens."""
    fewest = min(loads)
    best = [place for place, load in enumerate(loads) if load == fewest]
    return best[0] if len(best) == 1 else best[rng.randrange(len(best))]


def longest_prefix(candidates: Sequence[Candidate], rng: Random) -> int:
    """Return the place of one that holds the most of the prompt, of several the one with the fewest admitted tokens."""
    most = max(candidate.held for candidate in candidates)
    places = [place for place, candidate in enumerate(candidates) if candidate.held == most]
    return places[least_load([candidates[place].tokens for place in places], rng)]


def shortlist(count: int, holders: Iterable[int], rng: Random) -> Sequence[int]:
    """Return the places worth pricing: all of a few; of many the first of ``holders`` and some at random."""
    if count <= MANY:
        return range(count)
    chosen = dict.fromkeys(islice(holders, MANY // 2))
    chosen.update(dict.fromkeys(rng.choices(range(count), k=MANY // 2)))
    return list(chosen)


def preferred(candidates: Sequence[Endpoint], avoid: Container[str]) -> Sequence[Endpoint]:
    """Return the candidates that are not to be avoided, or all of them when that leaves none."""
    return [endpoint for endpoint in candidates if endpoint.id not in avoid] or candidates
