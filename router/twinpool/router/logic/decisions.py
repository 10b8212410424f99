"""The last choices of one process, with what they were made from: for somebody who asks why a worker got a request.

Kept only while somebody looks. Always true: no more than :data:`KEPT`, and nothing of a prompt but its length.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.logic.policy import Ask, Candidate

#: Choices that are kept, and for how many seconds after somebody looked last.
KEPT: Final = 64
LOOK_SECONDS: Final = 60.0


class Option(msgspec.Struct, frozen=True, rename="camel"):
    """A worker that was looked at. Seconds and tokens; ``price`` is None where the policy has none."""

    worker: str
    price: float | None = None
    backlog: float = 0.0
    requests: int = 0
    tokens: int = 0
    cached: int = 0
    held: int = 0
    pace: float = 1.0
    #: The data-parallel rank that the leg would name; None: the engine chooses, or has one only.
    rank: int | None = None


class Decision(msgspec.Struct, frozen=True, rename="camel"):
    """One choice: ``chosen`` is a pod; for ``handoff`` it is ``remote`` or ``local``, and ``saved`` seconds say why."""

    at: float
    choice: str
    prompt_tokens: int
    output_tokens: int
    chosen: str
    saved: float = 0.0
    options: tuple[Option, ...] = ()
    rank: int | None = None


class Decisions:
    """A bounded list of choices; ``wall`` gives seconds since the epoch, as people read time."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._kept: deque[Decision] = deque(maxlen=KEPT)

    def note(
        self,
        choice: str,
        ask: Ask,
        workers: Sequence[Endpoint],
        place: int,
        candidates: Sequence[Candidate] = (),
        prices: Sequence[float] = (),
    ) -> None:
        """A worker was chosen; ``prices`` and ``candidates`` are those of ``workers``, where there are some."""
        options = tuple(
            Option(
                worker.pod,
                round(prices[number], 6) if prices else None,
                round(one.backlog, 6),
                one.requests,
                one.tokens,
                one.cached,
                one.held,
                round(one.pace, 4),
                worker.rank if worker.seat else None,
            )
            for number, (worker, one) in enumerate(zip(workers, candidates, strict=False))
        )
        worker = workers[place]
        rank = worker.rank if worker.seat else None
        found = Decision(self._wall(), choice, ask.prompt, ask.output, worker.pod, options=options, rank=rank)
        self._kept.append(found)

    def handoff(self, ask: Ask, remote: bool, saved: float) -> None:
        """A request was, or was not, split over two workers, which saves so many seconds by the prices."""
        chosen = "remote" if remote else "local"
        self._kept.append(Decision(self._wall(), "handoff", ask.prompt, ask.output, chosen, round(saved, 6)))

    def last(self) -> list[Decision]:
        """Return the choices from the oldest on."""
        return list(self._kept)
