"""How much each API key may ask in a minute: a token bucket for its requests and one for its tokens. Pure.

A bucket holds one minute's worth, so a burst of that size passes. A request is let in while each bucket holds a whole
request or token, and may leave one in debt: one that is larger than a minute's worth passes once, and whoever sent it
waits the longer. Always true: over any time a key gets at most its rate, one minute's worth and one request; memory is
that of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MINUTE: Final = 60.0


@dataclass(slots=True)
class _Bucket:
    """``per_minute`` is what flows in, and the most that it holds (but one at least); 0: no limit."""

    per_minute: float
    level: float
    since: float

    def wait(self, now: float) -> float:
        """Return the seconds until it holds a whole one; 0 when it does."""
        if not self.per_minute:
            return 0.0
        self.level = min(max(1.0, self.per_minute), self.level + (now - self.since) * self.per_minute / _MINUTE)
        self.since = now
        return 0.0 if self.level >= 1 else (1 - self.level) / self.per_minute * _MINUTE


class Rates:
    """The buckets of one data process; ``requests`` and ``tokens`` are those of a minute, 0: any number."""

    def __init__(self, requests: float, tokens: float) -> None:
        self._rates = requests, tokens
        self._buckets: dict[str, tuple[_Bucket, _Bucket]] = {}

    def take(self, key: str, tokens: int, now: float) -> float:
        """Let a request of so many tokens in and return 0, or return the seconds after which to come back."""
        buckets = self._buckets.get(key)
        if buckets is None:
            requests, most = self._rates
            buckets = self._buckets[key] = (
                _Bucket(requests, max(1.0, requests), now),
                _Bucket(most, max(1.0, most), now),
            )
        wait = max(bucket.wait(now) for bucket in buckets)
        if not wait:
            buckets[0].level -= 1
            buckets[1].level -= tokens
        return wait
