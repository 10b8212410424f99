"""What one router process makes of the exact index: the names of a prompt's blocks, and who is relied on for them.

Always true: a worker whose engine reports other cached tokens than its events foretold is not relied on, until they
agree again; who is not relied on is estimated as if there were no events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from twinpool.core.blockhash import chain
from twinpool.router.logic.request import cache_salt

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from twinpool.core.blockhash import Adapter
    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.logic.index_exact import Held
    from twinpool.router.logic.request import Fields

#: Blocks of a prompt that are named: a millisecond of work; what two prompts share beyond it decides nothing.
MOST_BLOCKS: Final = 2048
#: Share of the distance to the last report that agreement goes, and the least with which a worker is relied on.
_WEIGHT: Final = 0.1
_LEAST: Final = 0.8


class Cached(msgspec.Struct, frozen=True):
    """Prompt tokens of a worker, in accelerator memory and anywhere. ``sure``: by events alone, none just expected."""

    device: int = 0
    anywhere: int = 0
    sure: bool = False


#: What is relied on, and has nothing of a prompt.
_EMPTY: Final = Cached(sure=True)


class ExactView:
    """Endpoints by id, and those with several ranks by seat."""

    def __init__(self) -> None:
        #: Tokens of a block; 0: nobody is relied on.
        self.size = 0
        self._endpoints: Container[str] = frozenset()
        self._agreement: dict[str, float] = {}

    def rely(self, size: int, endpoints: Container[str]) -> None:
        """These endpoints' events can be relied on now, and no others."""
        self.size, self._endpoints = size, endpoints

    def keep(self, known: Container[str]) -> None:
        """Forget endpoints that are gone."""
        self._agreement = {name: share for name, share in self._agreement.items() if name in known}

    def names(self, ids: list[int], fields: Fields, adapter: Adapter | None = None) -> tuple[int, ...]:
        """Return the names of a prompt's blocks; none while nobody is relied on."""
        return tuple(chain(ids, self.size, MOST_BLOCKS, cache_salt(fields), adapter)) if self.size else ()

    def cached(self, worker: str, held: Mapping[str, Held], prompt: int) -> Cached | None:
        """Return what a worker holds of a prompt of so many tokens, or None when it is not relied on.

        An engine always computes the last token, and shares whole blocks only.
        """
        if worker not in self._endpoints or not self.size:
            return None
        found = held.get(worker)
        if found is None:
            return _EMPTY
        most = (prompt - 1) // self.size
        device, anywhere = (min(most, max(blocks, found.expected)) for blocks in (found.device, found.anywhere))
        return Cached(device * self.size, anywhere * self.size, found.expected <= found.device)

    def found(self, workers: Iterable[Endpoint], held: Mapping[str, Held], prompt: int) -> dict[str, Cached]:
        """Return what those ``workers``, of one rank each, hold that are relied on and trusted, by id."""
        found = {}
        for worker in workers:
            cached = self.cached(worker.id, held, prompt)
            if cached is not None and self.trusted(worker.id):
                found[worker.id] = cached
        return found

    def knows(self, worker: str) -> bool:
        """Whether what a worker holds is taken from its events."""
        return worker in self._endpoints and self.trusted(worker)

    def trusted(self, worker: str) -> bool:
        """Whether a worker's engine has reported what its events foretold."""
        return self._agreement.get(worker, 1.0) >= _LEAST

    def judge(self, worker: str, foretold: int, reported: int) -> bool:
        """Compare what was foretold with what the engine reports; return whether they agree within a block."""
        right = abs(foretold - reported) < max(self.size, 1)
        if foretold or reported:  # most prompts are new, and that one was says nothing
            before = self._agreement.get(worker, 1.0)
            self._agreement[worker] = before + _WEIGHT * (right - before)
        return right
