"""What the watches have seen, trimmed to what planning needs. Reading it asks nobody.

kopf's own indices are not used: while they fill, every object waits for every other one, and each that is done wakes
all that wait. That is quadratic: minutes of CPU for ten thousand objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.core import protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.operator.logic.observed import Child, PodView

PoolKey = tuple[str, str]

POD = "Pod"


class Cache:
    """Views of objects by kind and pool: bodies of pools, :class:`PodView` of pods, :class:`Child` of the rest."""

    def __init__(self) -> None:
        self._by_pool: dict[str, dict[PoolKey, dict[str, Any]]] = {}
        #: The pool of every object that was seen, None for one that belongs to none.
        self._pool_of: dict[str, dict[str, PoolKey | None]] = {}

    def put(self, kind: str, uid: str, key: PoolKey | None, view: Any) -> None:
        """Keep the newest view of an object."""
        if self._pool_of.get(kind, {}).get(uid, key) != key:
            self.remove(kind, uid)
        self._pool_of.setdefault(kind, {})[uid] = key
        if key is not None:
            self._by_pool.setdefault(kind, {}).setdefault(key, {})[uid] = view

    def remove(self, kind: str, uid: str) -> None:
        """Drop an object that is gone."""
        key = self._pool_of.get(kind, {}).pop(uid, None)
        if key is None:
            return
        views = self._by_pool[kind][key]
        del views[uid]
        if not views:
            del self._by_pool[kind][key]

    def pools(self) -> list[PoolKey]:
        """Return the keys of all pools."""
        return list(self._by_pool.get(protocol.KIND, {}))

    def pool(self, key: PoolKey) -> dict[str, Any] | None:
        """Return a pool as the API server sent it, without managed fields, or None when there is none."""
        # Two of one name: the older one's end is not known yet.
        found: list[dict[str, Any]] = list(self._of(protocol.KIND, key))
        return found[-1] if found else None

    def children(self, key: PoolKey) -> list[Child]:
        """Return the objects that belong to a pool."""
        kinds = [kind for kind in self._by_pool if kind not in (protocol.KIND, POD)]
        return [child for kind in kinds for child in self._of(kind, key)]

    def pods(self, key: PoolKey) -> tuple[PodView, ...]:
        """Return the pods of a pool."""
        return tuple(self._of(POD, key))

    def uids(self, kind: str) -> set[str]:
        """Return the uids of everything of a kind that was seen and is not gone."""
        return set(self._pool_of.get(kind, {}))

    def known(self, kind: str) -> list[tuple[PoolKey, str, str]]:
        """Return pool, name and uid of everything of a kind that belongs to a pool."""
        return [
            (key, view["metadata"]["name"] if kind == protocol.KIND else view.name, uid)
            for key, views in self._by_pool.get(kind, {}).items()
            for uid, view in views.items()
        ]

    def _of(self, kind: str, key: PoolKey) -> Iterable[Any]:
        views: Mapping[str, Any] = self._by_pool.get(kind, {}).get(key, {})
        return views.values()
