"""Data-parallel ranks behind one endpoint: what each is called, where it publishes KV events, what it has to do.

Ranks share an HTTP server and nothing else: each has a KV cache and a queue of its own. A *seat* is an endpoint at one
of its ranks, which legs name in a header; without it the engine chooses, as it balances inside. An endpoint with one
rank has no seats: its id is the name of the rank too, and it pays nothing for any of this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from twinpool.router.logic.ledger import Load

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.logic.ledger import Ledger

#: Between the id of an endpoint and a rank; no id has it.
SEAT_MARK: Final = "#"

#: Seats by the id of their endpoint, in the order of ranks; only endpoints with several ranks have any.
Seats = dict[str, tuple["Endpoint", ...]]


def seat_name(endpoint: str, rank: int) -> str:
    """Return what books and index call a rank of an endpoint with several."""
    return f"{endpoint}{SEAT_MARK}{rank}"


def endpoint_of(name: str) -> str:
    """Return the id of the endpoint that a seat is of; an endpoint's own id is its own."""
    return name.partition(SEAT_MARK)[0]


def seats_of(endpoints: Iterable[Endpoint]) -> Seats:
    """Return the seats of endpoints with several ranks."""
    return {
        each.id: tuple(replace(each, rank=rank, seat=seat_name(each.id, rank)) for rank in range(each.ranks))
        for each in endpoints
        if each.ranks > 1
    }


def names_of(known: Mapping[str, Endpoint], seats: Seats) -> frozenset[str]:
    """Return every name under which something is booked or held: endpoints and seats."""
    return frozenset(known) | {seat.seat for those in seats.values() for seat in those}


def addressed(head: tuple[bytes, bytes], seat: Endpoint) -> tuple[bytes, bytes]:
    """Return a leg's target and header lines with the one that tells the rank (vLLM 0.32, ``base/serving.py``)."""
    return head[0], head[1] + b"X-data-parallel-rank: %d\r\n" % seat.rank


@dataclass(frozen=True, slots=True)
class Publisher:
    """Where one rank's KV events come from; ``replay`` is 0 where there are no replays."""

    name: str
    endpoint: str
    pod: str
    rank: int
    host: str
    events: int
    replay: int


def publishers(endpoint: Endpoint) -> list[Publisher]:
    """Return the ranks of an endpoint whose events can be followed: those that publish, at an address that is known.

    Rank r publishes at its own pod, on the first rank's ports + r, which is counted over all pods of the group (vLLM
    0.32, ``ZmqEventPublisher.offset_endpoint_port`` with ``data_parallel_index``).
    """
    if not endpoint.events:
        return []
    hosts = endpoint.rank_hosts or (endpoint.host,) * endpoint.ranks
    return [
        Publisher(
            name=endpoint.id if endpoint.ranks == 1 else seat_name(endpoint.id, rank),
            endpoint=endpoint.id,
            pod=endpoint.pod,
            rank=rank,
            host=host,
            events=endpoint.events + rank,
            replay=endpoint.replay + rank if endpoint.replay else 0,
        )
        for rank, host in enumerate(hosts)
        if host
    ]


def shared(ledger: Ledger, endpoint: Endpoint) -> Load:
    """Return what a rank has to do that the engine chooses: of several ranks the one with the least, so rounded down.

    The engine counts what was sent to a rank by name too (vLLM 0.32, ``DPLBAsyncMPClient``), and levels its ranks.
    """
    whole = ledger.seen(endpoint.id)
    return whole if endpoint.ranks == 1 else _part(whole, endpoint.ranks)


def loads(ledger: Ledger, endpoint: Endpoint) -> list[Load]:
    """Return what each rank has to do: what was sent to it by name, and an even share of what the engine placed.

    The engine places less where there is more already, so a rank that is named often has rather less than this: it is
    sooner left alone than flooded.
    """
    named = [ledger.seen(seat_name(endpoint.id, rank)) for rank in range(endpoint.ranks)]
    whole = ledger.seen(endpoint.id)
    rest = Load(
        whole.tokens - sum(load.tokens for load in named),
        whole.requests - sum(load.requests for load in named),
        whole.prefill - sum(load.prefill for load in named),
    )
    even = _part(rest, endpoint.ranks)
    return [
        Load(load.tokens + even.tokens, load.requests + even.requests, load.prefill + even.prefill) for load in named
    ]


def load_at(ledger: Ledger, endpoint: Endpoint) -> Load:
    """Return what the rank has to do that a leg to ``endpoint`` comes to: the one that is named, or the engine's."""
    return loads(ledger, endpoint)[endpoint.rank] if endpoint.seat else shared(ledger, endpoint)


def _part(load: Load, ranks: int) -> Load:
    return Load(max(0, load.tokens) // ranks, max(0, load.requests) // ranks, max(0, load.prefill) // ranks)
