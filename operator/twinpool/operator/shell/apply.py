"""Carrying out a plan: one request per action, one for the status if it changed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Action, Apply, Delete, Retire
from twinpool.operator.logic.observed import Refusal
from twinpool.operator.shell.cluster import ApiRefused, Cluster

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.operator.shell.lease import Leadership
    from twinpool.operator.shell.observe import Memory
    from twinpool.operator.shell.watch import PoolKey

_log = logging.getLogger(__name__)

#: Answers that mean "what you saw is old" or "it is gone already": look again, no error.
_STALE = (404, 409)


class NotLeader(Exception):
    """The Lease was lost in the middle of a plan; whoever holds it now plans anew."""


class Executor:
    """Writes for as long as the Lease is held."""

    def __init__(self, cluster: Cluster, leadership: Leadership, memory: Memory) -> None:
        self._cluster = cluster
        self._leadership = leadership
        self._memory = memory

    async def execute(self, key: PoolKey, actions: tuple[Action, ...]) -> tuple[Refusal, ...]:
        """Carry out the actions in order and return what the API server refused for good reasons of its own.

        Raises
        ------
        ApiRefused
            When the API server does not answer, is overloaded or broken: everything else would fail as well.
        NotLeader
            When the Lease was lost.
        """
        refusals = []
        for action in actions:
            self._check()
            try:
                await self._one(key, action)
            except ApiRefused as error:
                if error.code in _STALE and not isinstance(action, Apply):
                    continue
                if error.code == 0 or error.code == 429 or error.code >= 500:
                    raise
                kind = action.kind if isinstance(action, Apply | Delete) else "StatefulSet"
                refusals.append(Refusal(kind, action.name, error.message))
        return tuple(refusals)

    async def write_status(self, key: PoolKey, uid: str, before: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Write the status unless the pool has it already; a pool that is gone needs none."""
        if before == status:
            return
        self._check()
        try:
            await self._cluster.apply_status(*key, uid, status)
        except ApiRefused as error:
            if error.code not in _STALE:
                raise

    def _check(self) -> None:
        if not self._leadership.valid:
            raise NotLeader

    async def _one(self, key: PoolKey, action: Action) -> None:
        namespace, pool = key
        match action:
            case Apply(body):
                self._memory.applied(key, body, await self._cluster.apply(body))
                _log.info("%s/%s: applied %s %s", namespace, pool, action.kind, action.name)
            case Retire(name, uid, resource_version):
                body = {
                    "metadata": {
                        "uid": uid,
                        "resourceVersion": resource_version,
                        "annotations": {names.RETIRED_ANNOTATION: "true"},
                    },
                    "spec": {"replicas": 0},
                }
                await self._cluster.merge("StatefulSet", namespace, name, body)
                _log.info("%s/%s: retired group %s", namespace, pool, name)
            case Delete(kind, name, uid, resource_version):
                await self._cluster.delete(kind, namespace, name, uid, resource_version)
                _log.info("%s/%s: deleted %s %s", namespace, pool, kind, name)
