"""Leadership by a coordination Lease: one operator writes, the others watch and are ready to take over.

As in client-go, a follower takes the Lease when it saw no renewal for the Lease's duration *by its own clock*, so
clocks need not agree. The leader stops writing when it could not renew for the renew deadline, which is shorter. On
a clean shutdown the holder's name is cleared and a follower takes over at its next look.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from twinpool.operator.shell.cluster import ApiRefused

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds: how long a silent leader is believed, how long a leader believes itself, and how often each looks."""

    duration: float = 15.0
    renew_deadline: float = 10.0
    retry: float = 2.0
    follow: float = 1.0


class LeaseApi(Protocol):
    """The part of the API server that a Lease needs."""

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        """Read one object."""
        ...

    async def create(self, kind: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create an object; refused with 409 when there is one."""
        ...

    async def replace(self, kind: str, namespace: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Replace an object; refused with 409 when its resourceVersion is another one."""
        ...


class Leadership:
    """Tries to hold a Lease; :attr:`held` is set while it may be assumed to be ours."""

    def __init__(
        self,
        api: LeaseApi,
        namespace: str,
        name: str,
        identity: str,
        times: LeaseTimes | None = None,
        changed: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._times = times or LeaseTimes()
        self._changed = changed
        self._renewed = float("-inf")
        self._seen: tuple[Any, ...] = ()
        self._seen_at = float("-inf")
        self.held = asyncio.Event()

    @property
    def valid(self) -> bool:
        """Return whether a write is allowed now: a renewal succeeded within the renew deadline."""
        return self.held.is_set() and self._now() < self._renewed + self._times.renew_deadline

    async def run(self) -> None:
        """Acquire and renew until cancelled."""
        while True:
            started = self._now()
            try:
                ours = await asyncio.wait_for(self._try(), self._times.renew_deadline)
            except (ApiRefused, TimeoutError) as error:
                if not (isinstance(error, ApiRefused) and error.code == 409):
                    problem = str(error) or "no answer in time"
                    _log.warning("the Lease %s/%s cannot be read or written: %s", self._namespace, self._name, problem)
                ours = self.valid
            else:
                if ours:
                    self._renewed = started
            self._set(ours)
            await asyncio.sleep(self._times.retry if ours else self._times.follow)

    async def release(self) -> None:
        """Give the Lease back, so that another operator need not wait; call it after :meth:`run` was cancelled."""
        if not self.held.is_set():
            return
        self._set(False)
        try:
            lease = await self._api.get("Lease", self._namespace, self._name)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"].update(holderIdentity="", leaseDurationSeconds=1, renewTime=_micro_time())
                await self._api.replace("Lease", self._namespace, self._name, lease)
        except ApiRefused as error:
            _log.warning("the Lease %s/%s could not be released: %s", self._namespace, self._name, error)

    async def _try(self) -> bool:
        try:
            lease = await self._api.get("Lease", self._namespace, self._name)
        except ApiRefused as error:
            if error.code != 404:
                raise
            metadata = {"name": self._name, "namespace": self._namespace}
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}
            await self._api.create("Lease", self._namespace, {**body, "spec": self._spec({})})
            return True
        spec = lease.get("spec") or {}
        if not self._may_take(spec):
            return False
        await self._api.replace("Lease", self._namespace, self._name, {**lease, "spec": self._spec(spec)})
        return True

    def _may_take(self, spec: dict[str, Any]) -> bool:
        holder = spec.get("holderIdentity") or ""
        if holder in ("", self._identity):
            return True
        record = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if record != self._seen:
            self._seen, self._seen_at = record, self._now()
        duration = float(spec.get("leaseDurationSeconds") or self._times.duration)
        return self._now() > self._seen_at + duration

    def _spec(self, before: dict[str, Any]) -> dict[str, Any]:
        now, holder = _micro_time(), before.get("holderIdentity")
        transitions = int(before.get("leaseTransitions") or 0)
        same = holder == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self._times.duration),
            "acquireTime": before.get("acquireTime", now) if same else now,
            "renewTime": now,
            "leaseTransitions": transitions if same or not before else transitions + 1,
        }

    def _set(self, ours: bool) -> None:
        if ours == self.held.is_set():
            return
        if ours:
            self.held.set()
        else:
            self.held.clear()
        _log.info("%s the Lease %s/%s", "holding" if ours else "no longer holding", self._namespace, self._name)
        self._changed(ours)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _micro_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
