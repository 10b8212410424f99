"""KV that a prefill worker keeps for a decode worker, each under a lease. Pure.

A lease ends exactly once: by the decode worker's word (pulled or not wanted), or by time. What comes after is counted,
never obeyed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinpool.worker.engines.simulated.logic.language import Content


@dataclass(frozen=True, slots=True)
class Lease:
    """One handoff that waits for its decode worker."""

    blocks: tuple[int, ...]
    content: Content
    tokens: int
    expires: float


class Leases:
    """The handoffs that wait, by request id, each for ``seconds`` since it was last asked for."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, request_id: str, blocks: tuple[int, ...], content: Content, tokens: int, now: float) -> None:
        """Keep the blocks of a finished prefill."""
        self._leases[request_id] = Lease(blocks, content, tokens, now + self.seconds)

    def get(self, request_id: str) -> Lease | None:
        """Return the lease while it lasts."""
        return self._leases.get(request_id)

    def extend(self, request_id: str, now: float) -> bool:
        """Start the lease's time anew (the decode worker's heartbeat); False when it is over."""
        lease = self._leases.get(request_id)
        if lease is None:
            return False
        self._leases[request_id] = replace(lease, expires=now + self.seconds)
        return True

    def close(self, request_id: str) -> Lease | None:
        """End a lease by the decode worker's word and return it; None when it is over already."""
        return self._leases.pop(request_id, None)

    def expire(self, now: float) -> list[Lease]:
        """End and return the leases whose time is over."""
        over = [request_id for request_id, lease in self._leases.items() if lease.expires <= now]
        return [self._leases.pop(request_id) for request_id in over]

    def next_expiry(self) -> float | None:
        """Return when the next lease ends by time; None when none is open."""
        return min((lease.expires for lease in self._leases.values()), default=None)
