"""Which of several endpoints gets the next request.

``turn`` is a counter of the caller's, one per role; ``rng`` is the caller's too, so equal inputs give equal choices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from random import Random

    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.logic.ledger import Ledger

Policy = Literal["least-load", "round-robin", "random"]


def choose(policy: Policy, candidates: Sequence[Endpoint], ledger: Ledger, turn: int, rng: Random) -> Endpoint:
    """Pick one of ``candidates``, which must not be empty.

    ``least-load`` takes the fewest admitted tokens and breaks ties at random: routers that all took the first one
    would send the next burst to the same worker.
    """
    count = len(candidates)
    if count == 1:
        return candidates[0]
    if policy == "round-robin":
        # Each cycle starts one further on, or prefill i would for ever be paired with decode i.
        return candidates[(turn + turn // count) % count]
    if policy == "random":
        return candidates[rng.randrange(count)]
    loads = [ledger[endpoint.id].tokens for endpoint in candidates]
    least = min(loads)
    best = [endpoint for endpoint, load in zip(candidates, loads, strict=True) if load == least]
    return best[0] if len(best) == 1 else best[rng.randrange(len(best))]


def preferred(candidates: Sequence[Endpoint], avoid: Container[str]) -> Sequence[Endpoint]:
    """Return the candidates that are not to be avoided, or all of them when that leaves none."""
    return [endpoint for endpoint in candidates if endpoint.id not in avoid] or candidates
