"""Carrying out a plan: one request per action, one for the status if it changed."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import (
    Action,
    Annotate,
    Apply,
    Delete,
    HandOver,
    PutBack,
    Retire,
    ScaleToZero,
    SetGate,
    TakeBack,
    Try,
    WriteScaling,
)
from twinpool.operator.logic.contest import Repair
from twinpool.operator.logic.observed import Refusal, read_child, read_pod, timestamp
from twinpool.operator.shell.cluster import ApiRefused, Cluster
from twinpool.operator.shell.metrics import Metrics
from twinpool.operator.shell.observe import belongs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twinpool.operator.shell.lease import Leadership
    from twinpool.operator.shell.observe import Memory
    from twinpool.operator.shell.recorder import Recorder
    from twinpool.operator.shell.watch import PoolKey

_log = logging.getLogger(__name__)

#: Answers that mean "what you saw is old" or "it is gone already": look again, no error.
_NOT_FOUND, _CONFLICT, _INVALID = 404, 409, 422
_STALE = (_NOT_FOUND, _CONFLICT)
#: What the API server says of a webhook that is not made for dry runs.
_NO_DRY_RUN = "does not support dry run"


class NotLeader(Exception):
    """The Lease was lost in the middle of a plan; whoever holds it now plans anew."""


class Executor:
    """Writes for as long as the Lease is held."""

    def __init__(
        self,
        cluster: Cluster,
        leadership: Leadership,
        memory: Memory,
        metrics: Metrics | None = None,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics or Metrics()
        self._cluster = cluster
        self._leadership = leadership
        self._memory = memory
        self._recorder = recorder
        self._clock = clock

    def forget(self, key: PoolKey) -> None:
        """Forget a pool that is gone."""
        if self._recorder:
            self._recorder.forget(key)

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
                if error.code in (0, 401, 429) or error.code >= 500:
                    raise
                self._count(action, "stale" if error.code in _STALE else "refused")
                if error.code not in _STALE:
                    refusals.append(Refusal(action.kind, action.name, error.message))
            else:
                self._count(action, "done")
        return tuple(refusals)

    async def restore_labels(self, key: PoolKey, pool_uid: str, group: str) -> bool:
        """Give a group its labels back if it only seems to be gone; return whether it was there.

        A watch by label reports an object as deleted when a hand edit takes the label away.
        """
        self._check()
        namespace, pool = key
        try:
            found = read_child("StatefulSet", await self._cluster.get("StatefulSet", namespace, group))
            if found.deleting or not belongs(found, pool, pool_uid):
                return False
            labels = {protocol.LABEL_MANAGED_BY: protocol.MANAGED_BY, protocol.LABEL_POOL: pool}
            await self._cluster.merge(
                "StatefulSet", namespace, group, {"metadata": {"uid": found.uid, "labels": labels}}
            )
        except ApiRefused as error:
            if error.code in _STALE:
                return False
            raise
        _log.info("%s/%s: group %s had lost its labels", namespace, pool, group)
        return True

    async def write_status(self, key: PoolKey, uid: str, before: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Write the status, and Events of what changed, unless the pool has it already; one that is gone needs none."""
        if before == status:
            return
        self._check()
        try:
            await self._cluster.apply_status(*key, uid, status)
        except ApiRefused as error:
            if error.code not in _STALE:
                raise
            return
        if self._recorder:
            await self._recorder.changed(key, uid, before, status)

    async def _apply(self, body: Mapping[str, Any], uid: str, resource_version: str) -> dict[str, Any]:
        """Apply an object that is the pool's or does not exist; never take over a stranger's of the same name."""
        kind, metadata = body["kind"], body["metadata"]
        if not uid:
            uid, resource_version = await self._unseen(
                kind, metadata["namespace"], metadata["name"], metadata["ownerReferences"][0]
            )
            self._check()
        exact = {"uid": uid, "resourceVersion": resource_version} if uid else {}
        known = {**body, "metadata": {**metadata, **exact}}
        try:
            return await self._cluster.apply(known)
        except ApiRefused as error:
            if error.code != _INVALID or not uid:
                raise
            # A hand edit may have changed the key of a list entry, such as a port's number: applying puts ours beside
            # it, which is invalid. A merge replaces the list.
            _log.info("%s %s: replacing lists, because applying was refused: %s", kind, metadata["name"], error.message)
            return await self._cluster.merge(kind, metadata["namespace"], metadata["name"], known)

    async def _unseen(self, kind: str, namespace: str, name: str, owner: Mapping[str, Any]) -> tuple[str, str]:
        """Return uid and resourceVersion of an object that the watches do not show, empty when there is none."""
        try:
            found = read_child(kind, await self._cluster.get(kind, namespace, name))
        except ApiRefused as error:
            if error.code == _NOT_FOUND:
                return "", ""
            raise
        if not belongs(found, owner["name"], owner["uid"]):
            raise ApiRefused(_INVALID, "it exists and is not the pool's; remove it, or give the pool another name")
        return found.uid, found.resource_version

    def _count(self, action: Action, result: str) -> None:
        self._metrics.actions.labels(type(action).__name__.lower(), action.kind, result).inc()

    def _check(self) -> None:
        if not self._leadership.valid:
            raise NotLeader

    async def _one(self, key: PoolKey, action: Action) -> None:
        namespace, pool = key
        match action:
            case Apply(body, uid, resource_version, against):
                self._memory.applied(key, body, await self._apply(body, uid, resource_version))
                if against is not None:
                    self._memory.repaired(key, Repair(action.kind, action.name, against, self._clock()))
                _log.info("%s/%s: applied %s %s", namespace, pool, action.kind, action.name)
            case Try(body, revision, role):
                await self._try_out(body)
                self._memory.took(key, revision, role)
            case Retire() | PutBack() | ScaleToZero() | SetGate():
                await self._leave(key, action)
            case Annotate(kind, name, uid, annotation, value):
                body = {"metadata": {"uid": uid, "annotations": {annotation: value}}}
                await self._cluster.merge(kind, namespace, name, body)
            case HandOver():
                await self._hand_over(key, action)
            case TakeBack(name, uid, reason):
                await self._cluster.delete("Pod", namespace, name, uid, "")
                _log.warning("%s/%s: deleted pod %s, which must get another node: %s", *key, name, reason)
            case WriteScaling():
                await self._scale(key, action)
            case Delete(kind, name, uid, resource_version):
                await self._cluster.delete(kind, namespace, name, uid, resource_version)
                _log.info("%s/%s: deleted %s %s", namespace, pool, kind, name)

    async def _scale(self, key: PoolKey, action: WriteScaling) -> None:
        await self._cluster.apply_scaling(*key, action.uid, action.resource_version, action.scaling)
        if action.changes and action.scaling is not None:
            self._metrics.scaling_changes.inc()
            target = action.scaling["target"]
            _log.info(
                "%s/%s: %d prefill and %d decode groups from now on: %s",
                *key,
                target["prefill"],
                target["decode"],
                action.scaling["reason"],
            )

    async def _try_out(self, body: Mapping[str, Any]) -> None:
        """Ask for a dry run; where admission cannot do one, or its answer is about something else, nothing is known."""
        try:
            await self._cluster.try_out(body)
        except ApiRefused as error:
            if error.code not in _STALE and _NO_DRY_RUN not in error.message:
                raise

    async def _hand_over(self, key: PoolKey, action: HandOver) -> None:
        try:
            await self._cluster.patch_exactly("Pod", key[0], action.name, action.patch)
        except ApiRefused as error:
            if error.code != _INVALID:
                raise
            # A test of the patch fails when the pod is another one, or handed over already: our view was old.
            found = read_pod(await self._cluster.get("Pod", key[0], action.name))
            if found.uid == action.uid and protocol.PLACEMENT_GATE in found.scheduling_gates:
                raise
            raise ApiRefused(_CONFLICT, error.message) from error
        _log.info("%s/%s: pod %s goes to %s", *key, action.name, f"node {action.node}" if action.node else "any node")

    async def _merge_group(self, key: PoolKey, name: str, body: Mapping[str, Any]) -> None:
        """Merge into a group's StatefulSet, and remember it as that left it."""
        answer = await self._cluster.merge("StatefulSet", key[0], name, body)
        self._memory.wrote(key, read_child("StatefulSet", answer))

    async def _leave(self, key: PoolKey, action: Retire | PutBack | ScaleToZero | SetGate) -> None:
        """Carry out what takes groups into and out of service."""
        namespace, _pool = key
        match action:
            case Retire(name, uid, version, until, kept):
                marks = {names.RETIRED_ANNOTATION: "true", protocol.ANNOTATION_DRAINING: until}
                marks |= {names.KEPT_ANNOTATION: kept} if kept else {}
                body: dict[str, Any] = {"metadata": {"uid": uid, "resourceVersion": version, "annotations": marks}}
                await self._merge_group(key, name, body)
                _log.info("%s/%s: group %s is on its way out, its requests may run until %s", *key, name, until)
            case PutBack(name, uid, version):
                taken = (names.RETIRED_ANNOTATION, protocol.ANNOTATION_DRAINING, names.KEPT_ANNOTATION)
                body = {"metadata": {"uid": uid, "resourceVersion": version, "annotations": dict.fromkeys(taken)}}
                await self._merge_group(key, name, body)
                _log.info("%s/%s: group %s is wanted again and stays", *key, name)
            case ScaleToZero(name, uid, version, result):
                body = {"metadata": {"uid": uid, "resourceVersion": version}, "spec": {"replicas": 0}}
                await self._merge_group(key, name, body)
                self._metrics.drains.labels(result).inc()
                _log.info("%s/%s: scaled group %s to 0: %s", *key, name, result)
            case SetGate(name, uid, opened, reason, message):
                condition = {
                    "type": protocol.ROUTABLE_GATE,
                    "status": "True" if opened else "False",
                    "reason": reason,
                    "message": message,
                    "lastTransitionTime": timestamp(self._clock()),
                }
                await self._cluster.set_pod_condition(namespace, name, uid, condition)
                _log.info("%s/%s: pod %s is %sroutable: %s", *key, name, "" if opened else "not ", message)
