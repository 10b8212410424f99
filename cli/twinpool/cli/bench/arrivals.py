"""When requests are sent and what they ask for. Pure: randomness comes in as an argument, times are in seconds.

An open loop: the moment of each request is fixed beforehand and does not wait for answers, as with users who know
nothing of each other. A slow endpoint then gets as many requests as a fast one, so its queue is seen (Schroeder,
Wierman and Harchol-Balter, NSDI'06).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from twinpool.simulate.traces import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from twinpool.simulate.traces import Request

#: Token ids that every vocabulary has, without the special ones at its beginning. Smallest known: 32,000 (Llama 2).
_FIRST_ID, _LAST_ID = 1000, 31_000


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to send ``at`` seconds after the begin; lengths in tokens.

    ``shared`` tokens at the begin of the prompt are the same in all requests of a run; ``blocks`` names blocks of 512
    tokens at its begin, as a trace has them.
    """

    at: float
    prompt: int
    output: int
    shared: int = 0
    blocks: tuple[int, ...] = ()


def constant(rate: float) -> Iterator[float]:
    """Yield moments at equal distances, ``rate`` of them a second."""
    number = 0
    while True:
        yield number / rate
        number += 1


def poisson(rate: float, rng: Random) -> Iterator[float]:
    """Yield the moments of a Poisson process with ``rate`` arrivals a second."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def at_once() -> Iterator[float]:
    """Yield 0 for ever: for a closed loop, whose requests go as soon as there is room."""
    while True:
        yield 0.0


def planned(
    moments: Iterator[float], prompt: int, output: int, shared: int, *, most: int, seconds: float
) -> list[Planned]:
    """Return at most ``most`` requests of equal lengths whose moments lie within ``seconds``."""
    found: list[Planned] = []
    for at in moments:
        if at >= seconds or len(found) >= most:
            return found
        found.append(Planned(at, prompt, output, shared))
    return found


def replayed(trace: Sequence[Request], speed: float, *, most: int, seconds: float) -> list[Planned]:
    """Return the requests of a trace at ``speed`` times its rate, at most ``most`` and within ``seconds``."""
    found = (Planned(one.arrival / speed, one.prompt, one.output, blocks=one.blocks) for one in trace[:most])
    return [request for request in found if request.at < seconds]


def prompt_ids(request: Planned, number: int, seed: int) -> list[int]:
    """Return the token ids of a request's prompt: equal names and shared parts give equal tokens, all else differs."""
    ids: list[int] = []
    for name in request.blocks:
        ids += _ids(f"{seed}/block/{name}", BLOCK_TOKENS)
    ids += _ids(f"{seed}/shared", request.shared)[: request.prompt]
    ids += _ids(f"{seed}/request/{number}", max(0, request.prompt - len(ids)))
    return ids[: request.prompt]


def _ids(name: str, count: int) -> list[int]:
    rng = Random(name)  # noqa: S311 - a prompt that can be made again, no secret
    return [rng.randrange(_FIRST_ID, _LAST_ID) for _ in range(count)]
