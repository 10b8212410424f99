"""What routers say of the work that arrives: their ``/admin/work``, read without trust.

Always true: a document that is no such report is none, and a number that is missing or no number counts as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add, sub
from typing import Any, NamedTuple


class Totals(NamedTuple):
    """Sums since a router began, or over a while; see ``router/logic/arrivals.py``. Seconds are the model's."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    prefill: float = 0.0
    prefill_squared: float = 0.0
    answered_tokens: float = 0.0
    cached_tokens: float = 0.0
    streams: float = 0.0
    streamed_tokens: float = 0.0
    prefill_log: float = 0.0
    prefills: float = 0.0
    step_log: float = 0.0
    steps: float = 0.0

    def plus(self, other: Totals) -> Totals:
        """Return both together."""
        return Totals(*map(add, self, other))

    def since(self, before: Totals) -> Totals:
        """Return what came after ``before``; all of it where the router began anew in between."""
        if self.requests < before.requests or self.prefills < before.prefills or self.streams < before.streams:
            return self
        return Totals(*map(sub, self, before))


_NOTHING = Totals()


@dataclass(frozen=True, slots=True)
class Work:
    """One router's answer: what arrived since it began, and what there is now."""

    totals: Totals = _NOTHING
    #: Requests that it holds back, for want of room or of workers.
    waiting: int = 0
    #: Prefill that its prefill workers have yet to do, in seconds of the model.
    prefill: float = 0.0
    #: Requests at its decode workers.
    decoding: int = 0
    #: Tokens whose KV each of its decode workers can hold; 0: not known.
    kv_tokens: int = 0


def read_work(document: Any) -> Work | None:
    """Return the answer of ``/admin/work``, or None when it is none, or not of this moment."""
    if not isinstance(document, Mapping) or document.get("current") is not True:
        return None
    arrivals = document.get("arrivals")
    if not isinstance(arrivals, Mapping):
        return None
    return Work(
        Totals(*(_number(arrivals.get(name)) for name in Totals._fields)),
        int(_number(document.get("waiting"))),
        _number(document.get("prefillSeconds")),
        int(_number(document.get("decoding"))),
        max(0, int(_number(document.get("kvTokens")))),
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and value == value and abs(value) < 1e18 else 0.0
