"""Which LoRA adapters a worker has at hand, where a pool has more than its engines keep loaded.

Learnt from where requests went: an engine keeps the adapters that it used last (vLLM's LRU of ``--max-loras``), and
brings another one in before the request runs. Always true: no more than ``slots`` adapters are at hand of a worker; of
one to which nothing went, none counts as loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Container

#: Seconds in which an engine brings an adapter in: assumed, some hundred megabytes from a local disk.
LOAD_SECONDS: Final = 0.1


class Residency:
    """Adapters by worker id; ``slots`` is how many an engine keeps, 0 where it keeps all that there are."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._loaded: dict[str, OrderedDict[str, None]] = {}

    def went(self, worker: str, adapter: str) -> None:
        """A request for an adapter goes to a worker."""
        loaded = self._loaded.setdefault(worker, OrderedDict())
        loaded[adapter] = None
        loaded.move_to_end(adapter)
        if len(loaded) > self.slots:
            loaded.popitem(last=False)

    def load(self, worker: str, adapter: str) -> float:
        """Return the seconds in which a worker brings an adapter in: none if it has it at hand."""
        return 0.0 if adapter in self._loaded.get(worker, ()) else LOAD_SECONDS

    def keep(self, known: Container[str]) -> None:
        """Forget workers that are gone."""
        self._loaded = {worker: loaded for worker, loaded in self._loaded.items() if worker in known}
