"""How much of what the workers can take one process may send them; the rest waits in its queue. Pure.

Engines queue what they cannot run, in order of arrival and without a bound: in overload everybody would wait his turn
there and miss the objective. So with an objective decode workers get as many requests as they run at once, and prefill
workers as much as they compute in half the objective; the queue of the router, which knows deadlines, holds the others.

Always true: a process may have its equal share at least, so that nobody starves; and what others leave, so that the
workers do not idle because clients chose another process.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twinpool.core.protocol import RouterConfig
    from twinpool.router.logic.ledger import Load

#: What the prefill of a worker may take of the objective: half, since the other half is for the request itself; all of
#: it where decode workers compute prompts, which they do only when those would wait. Chosen in simulation, among 0.5 to
#: 1.3: less takes work from decode workers that have time for it, more makes everybody wait in vain.
PREFILL_SHARE: Final = {False: 0.5, True: 1.0}
#: Share of the places from which on there is no time for anything else at the workers. Chosen in simulation, among 0.7
#: to 1: with it prompts that decode workers compute cost nobody a place.
CROWDED: Final = 0.9


class Worker(Protocol):
    """A worker as far as its places go."""

    @property
    def id(self) -> str:
        """Its identity, which changes when its engine restarts."""

    @property
    def ranks(self) -> int:
        """Its data-parallel ranks."""


class Elsewhere(NamedTuple):
    """What all other processes have, by endpoint; how many they are, and of how many nothing is known."""

    loads: Mapping[str, Load]
    processes: int = 0
    unheard: int = 0


class Places(NamedTuple):
    """Requests that a process may have at the workers, and seconds of prefill at prefill workers.

    ``crowded`` are those seconds while hardly a place is left, so that decode workers compute no prompts.
    """

    requests: int
    prefill: float = math.inf
    crowded: float = math.inf


def places(
    config: RouterConfig,
    prefill: Sequence[Worker],
    decode: Sequence[Worker],
    elsewhere: Elsewhere,
    processes: int,
    factor: float = 1.0,
) -> Places:
    """Return what one of the ``processes`` of a router may have at these workers; 0 requests where nobody decodes.

    ``factor``: observed over modelled seconds of a prefill, since others tell theirs as the model has them.
    """
    # Each data process has its share of the places, and at least one.
    requests = -(-config.queue_concurrency * len(decode) // processes)
    if config.ttft is None or not decode:
        return Places(requests)
    if config.sequences:
        there = sum(load.requests for load in elsewhere.loads.values())
        requests = min(requests, max(1, math.ceil(_part(config.sequences * len(decode), there, elsewhere))))
    if not prefill:
        return Places(requests)
    work = sum(elsewhere.loads[endpoint.id].backlog for endpoint in prefill if endpoint.id in elsewhere.loads)
    ranks = sum(endpoint.ranks for endpoint in prefill)  # each reads for itself
    shares = PREFILL_SHARE[config.conditional == "auto"], PREFILL_SHARE[False]
    return Places(requests, *(_part(share * config.ttft * ranks, work * factor, elsewhere) for share in shares))


def _part(total: float, taken: float, elsewhere: Elsewhere) -> float:
    equal = total / (1 + elsewhere.processes)
    return equal if elsewhere.unheard else max(equal, total - taken)
