"""What other processes of the pool's routers have admitted: their books beside the own ones, while they can be heard.

A data process's own books are exact at every moment. Those of its siblings (other data processes of the router) and of
other routers are what these said last, a fraction of a second ago. Always true: nobody's work counts twice; what was
not heard of for :data:`STALE_SECONDS` counts no more; and a copy that should serve and cannot be heard is taken to
have as much as the process itself, which is right on average, since clients choose among copies at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from twinpool.core import protocol
from twinpool.router.logic.ledger import Load
from twinpool.router.logic.seats import SEAT_MARK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

STALE_SECONDS: Final = 2.0
#: Seconds between two looks at the others, and how much longer for each one that there is: 64 routers ask each other
#: 40 times in a second, each.
INTERVAL_SECONDS: Final = 0.2
_PER_COPY: Final = 0.025
#: A router has not more data processes than this; what says so is not believed.
_PROCESSES: Final = 1024

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
#: Tokens, requests and microseconds of prefill at a worker, by :func:`shared_name`.
Loads = dict[str, tuple[int, int, int]]


class Books(msgspec.Struct, frozen=True):
    """What a router tells others (JSON of ``/admin/books``)."""

    #: An id of the router's control process, so that nobody takes itself for another.
    router: str
    processes: Annotated[int, msgspec.Meta(ge=1, le=_PROCESSES)]
    loads: dict[str, tuple[_Count, _Count, _Count]]


_books = msgspec.json.Decoder(Books).decode


class Copy(NamedTuple):
    """Another router of the pool."""

    #: Uid of its pod, or its address.
    name: str
    host: str
    port: int
    #: It serves clients: ready, and nobody asked it to go.
    serves: bool = True


@dataclass(frozen=True, slots=True)
class Others:
    """The work of all other processes, how many are not heard of, and how many they are in all."""

    loads: Loads
    unheard: int = 0
    processes: int = 0


def copy_of_pod(pod: Mapping[str, Any], port: int) -> Copy | None:
    """Return the router that a pod (as JSON) is, or None when it is none, has no address, or has ended."""
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    address = status.get("podIP")
    if (metadata.get("labels") or {}).get(protocol.LABEL_ROLE) != protocol.ROUTER_ROLE:
        return None
    if not address or status.get("phase") in ("Succeeded", "Failed"):
        return None
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())
    serves = ready and not metadata.get("deletionTimestamp")
    return Copy(str(metadata.get("uid", "")), str(address), port, serves)


def shared_name(endpoint: str) -> str:
    """Return what all routers call an endpoint or a seat: how often it stopped answering, each counts for itself."""
    whole, mark, rank = endpoint.partition(SEAT_MARK)
    return whole.partition("+")[0] + mark + rank


def loads_of(books: Iterable[tuple[str, Load]]) -> Loads:
    """Return books by shared names."""
    found: Loads = {}
    for endpoint, load in books:
        _add(found, {shared_name(endpoint): (load.tokens, load.requests, load.prefill)})
    return found


def read_books(body: bytes) -> Books | None:
    """Read what another router says, or None when it is not to be understood."""
    try:
        return _books(body)
    except msgspec.DecodeError:
        return None


def write_books(router: str, processes: int, loads: Loads) -> bytes:
    """Return what other routers read."""
    return msgspec.json.encode(Books(router, processes, loads))


def by_endpoint(loads: Loads, endpoints: Iterable[str]) -> dict[str, Load]:
    """Return the loads of those ``endpoints`` and seats that have any; what else is named is nobody's here."""
    found = {}
    for endpoint in endpoints:
        load = loads.get(shared_name(endpoint))
        if load is not None:
            tokens, requests, prefill = load
            found[endpoint] = Load(tokens, requests, prefill)
    return found


class Copies:
    """What the other routers of a pool said last; times in seconds on the caller's clock."""

    def __init__(self, router: str, processes: int) -> None:
        self._router = router
        self._processes = processes
        self._copies: dict[str, Copy] = {}
        self._heard: dict[str, tuple[float, Books]] = {}

    @property
    def interval(self) -> float:
        """Return how many seconds there should be between two looks at the others."""
        return max(INTERVAL_SECONDS, _PER_COPY * len(self._copies))

    @property
    def alone(self) -> bool:
        """Whether there is no other process to be heard."""
        return not self._copies and self._processes == 1

    def watch(self, copies: Iterable[Copy]) -> None:
        """Take these for the other routers from now on; the own one may be among them."""
        self._copies = {copy.name: copy for copy in copies}
        for gone in self._heard.keys() - self._copies.keys():
            del self._heard[gone]

    def asked(self) -> list[Copy]:
        """Return whom to ask: all but what has turned out to be this router itself."""
        return [copy for name, copy in self._copies.items() if not self._is_own(name)]

    def heard(self, copy: str, books: Books, now: float) -> None:
        """A router said what it has."""
        if copy in self._copies:
            self._heard[copy] = now, books

    def others(self, processes: Sequence[Loads], now: float) -> list[Others]:
        """Return, for each of the own data ``processes`` with these books, the work of all others."""
        elsewhere: Loads = {}
        unheard, heard = 0, len(processes) - 1
        for copy in self.asked():
            since, books = self._heard.get(copy.name, (-STALE_SECONDS, None))
            if books is not None and now - since < STALE_SECONDS:
                _add(elsewhere, books.loads)
                heard += books.processes
            elif copy.serves:
                unheard += self._processes if books is None else books.processes
        together = dict(elsewhere)
        for loads in processes:
            _add(together, loads)
        return [Others(_without(together, loads), unheard, heard + unheard) for loads in processes]

    def state(self, now: float) -> list[dict[str, Any]]:
        """Return what is known of each other router, as ``/admin/ledger`` shows it."""
        found = []
        for copy in self.asked():
            heard = self._heard.get(copy.name)
            fresh = heard is not None and now - heard[0] < STALE_SECONDS
            requests = _requests(heard[1].loads) if heard is not None and fresh else None
            found.append(
                {"address": f"{copy.host}:{copy.port}", "serves": copy.serves, "heard": fresh, "requests": requests}
            )
        return found

    def _is_own(self, name: str) -> bool:
        return name in self._heard and self._heard[name][1].router == self._router


def _requests(loads: Loads) -> int:
    """Return how many requests there are; one that was sent to a seat is in the books of its endpoint too."""
    return sum(load[1] for name, load in loads.items() if SEAT_MARK not in name)


def _add(to: Loads, loads: Mapping[str, tuple[int, int, int]]) -> None:
    for name, (tokens, requests, prefill) in loads.items():
        before = to.get(name, (0, 0, 0))
        to[name] = before[0] + tokens, before[1] + requests, before[2] + prefill


def _without(all_loads: Loads, own: Loads) -> Loads:
    rest = dict(all_loads)
    for name, (tokens, requests, prefill) in own.items():
        before = rest[name]
        rest[name] = before[0] - tokens, before[1] - requests, before[2] - prefill
    return {name: load for name, load in rest.items() if any(load)}
