"""Workers with several data-parallel ranks, as one process's choices see them: what each rank holds, and may cost.

Always true: a rank is named only where it holds more of a prompt than ranks do on average. For all else the engine
chooses better: it knows what waits and runs at each rank at the moment, from whatever client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from twinpool.router.logic.index_view import Cached
from twinpool.router.logic.seats import load_at, loads, shared

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from twinpool.router.logic.asked import Asked
    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.logic.index_exact import Held
    from twinpool.router.logic.index_view import ExactView
    from twinpool.router.logic.ledger import Ledger, Load
    from twinpool.router.logic.policy import Candidate
    from twinpool.router.logic.seats import Seats


class Ranks:
    """See the module. Workers with one rank are looked at as they always were."""

    def __init__(self, ledger: Ledger, exact: ExactView) -> None:
        self._ledger = ledger
        self._exact = exact
        #: Workers with several ranks at each of them; empty in most pools, which then pay nothing for ranks.
        self.seats: Seats = {}

    def load(self, worker: Endpoint) -> Load:
        """Return what the rank of a worker with several has to do that a leg to ``worker`` comes to."""
        return load_at(self._ledger, worker)

    def caches(self, worker: Endpoint) -> int:
        """Return how many caches of a worker are known by events: one, or one for each rank."""
        if worker.ranks == 1:
            return int(self._exact.knows(worker.id))
        return sum(self._exact.knows(seat.seat) for seat in self.seats.get(worker.id, ()))

    def found(self, workers: Iterable[Endpoint], held: Mapping[str, Held], prompt: int) -> dict[str, Cached]:
        """Return what ``workers`` hold of a prompt of so many tokens, as far as it is relied on and trusted, by id."""
        known = ((worker.id, self._relied(worker, held, prompt)) for worker in workers)
        return {name: cached for name, cached in known if cached is not None}

    def _relied(self, worker: Endpoint, held: Mapping[str, Held], prompt: int) -> Cached | None:
        """Return what is found at a worker; where the engine chooses the rank, that is the mean of its ranks.

        Those that are not relied on count as empty, since what they hold is not for this to promise.
        """
        if worker.ranks == 1 or worker.seat:
            name = worker.seat or worker.id
            return self._exact.cached(name, held, prompt) if self._exact.trusted(name) else None
        ranks = [self._relied(seat, held, prompt) for seat in self.seats.get(worker.id, ())]
        known = [cached for cached in ranks if cached is not None]
        if not known:
            return None
        device, anywhere = sum(cached.device for cached in known), sum(cached.anywhere for cached in known)
        return Cached(device // worker.ranks, anywhere // worker.ranks)

    def candidates(
        self, asked: Asked, workers: Sequence[Endpoint], wholes: Sequence[Candidate], factor: float
    ) -> tuple[Sequence[Endpoint], tuple[Candidate, ...]]:
        """Return candidates that are one rank each: the one that the engine would choose, and those with more cached.

        ``wholes`` are the workers as if each were one engine; ``factor`` corrects the model's seconds.
        """
        held, prompt = asked.held or {}, asked.ask.prompt
        found: list[Endpoint] = []
        priced: list[Candidate] = []
        for worker, whole in zip(workers, wholes, strict=True):
            scale, room = factor * whole.pace, whole.capacity // worker.ranks
            found.append(worker)
            priced.append(_at(whole, shared(self._ledger, worker), scale, room))
            known = ((seat, self._relied(seat, held, prompt)) for seat in self.seats.get(worker.id, ()))
            better = [(seat, cached) for seat, cached in known if cached and cached.anywhere > whole.held]
            each = loads(self._ledger, worker) if better else []
            for seat, cached in better:
                found.append(seat)
                holds = replace(whole, cached=cached.device, held=cached.anywhere)
                priced.append(_at(holds, each[seat.rank], scale, room))
        return found, tuple(priced)


def _at(whole: Candidate, load: Load, scale: float, room: int) -> Candidate:
    return replace(whole, requests=load.requests, tokens=load.tokens, backlog=load.backlog * scale, capacity=room)
