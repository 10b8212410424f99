"""What the routers say about groups: which they list, which get nothing new, and what is in flight.

Routers are asked only while a pod waits for its gate, drains, or a group is to be chosen, and while the pool has
renderers, which only routers can judge; another idle pool asks nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinpool.operator.logic import names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.operator.logic.observed import PodView


@dataclass(frozen=True, slots=True)
class Entry:
    """One endpoint in one router's books."""

    admitted: bool = False
    draining: bool = False
    in_flight: int = 0
    tokens: int = 0
    #: Handoffs whose KV cache nobody has pulled yet.
    unpulled: int = 0
    #: Prompt tokens that its cache has spared lately, fading: what would be computed again without it.
    cached: int = 0

    @property
    def idle(self) -> bool:
        """Return whether the endpoint gets nothing new and owes nothing."""
        return self.draining and not self.in_flight and not self.unpulled


@dataclass(frozen=True, slots=True)
class Report:
    """One router's answer: entries by the uid of the leader's pod."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    #: Whether the list was read and every data process answered; otherwise nothing follows from what is missing.
    current: bool = True
    #: Whether it found that engines read other tokens than the pool's renderers make.
    distrusts: bool = False

    def gist(self) -> object:
        """Return what decisions turn on; the numbers of busy endpoints change all the time."""
        return self.current, self.distrusts, {uid: (entry.admitted, entry.idle) for uid, entry in self.entries.items()}


#: Answers by name of the router's pod; None for a router that did not answer.
Reports = Mapping[str, Report | None]

_UNKNOWN = Entry()


def read_report(document: Any) -> Report | None:
    """Return the answer of ``/admin/endpoints``, or None when it is no such answer."""
    if not isinstance(document, Mapping) or not isinstance(document.get("endpoints"), list):
        return None
    entries = {}
    for item in document["endpoints"]:
        if isinstance(item, Mapping) and item.get("uid"):
            entries[str(item["uid"])] = Entry(
                admitted=item.get("admitted") is True,
                draining=item.get("draining") is True,
                in_flight=_count(item.get("inFlight")),
                tokens=_count(item.get("tokensInFlight")),
                unpulled=_count(item.get("unpulledHandoffs")),
                cached=_count(item.get("cachedTokensUsed")),
            )
    current = document.get("synced") is True and document.get("current") is True
    return Report(entries, current, document.get("distrustsRenderers") is True)


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 0


def routers(pods: Iterable[PodView]) -> list[PodView]:
    """Return the routers that can be asked; one that drains still streams and is asked too."""
    return [pod for pod in pods if pod.role == names.ROUTER and pod.address and pod.phase == "Running"]


def serving_routers(pods: Iterable[PodView]) -> list[PodView]:
    """Return the routers that clients are sent to."""
    return [pod for pod in routers(pods) if pod.ready and pod.deadline is None]


def entry(report: Report | None, uid: str) -> Entry | None:
    """Return what a router says about a leader; None when it did not answer, or not for this moment."""
    if report is None or not report.current:
        return None
    return report.entries.get(uid, _UNKNOWN)
