"""Requests drawn in the manner of published workloads, where no trace is at hand. Pure: equal seeds, equal requests.

Always true: a trace has about the asked-for rate and means, whatever its manner; requests come in order of time. These
are shapes with our constants where a paper gives none: they stand for nobody's traffic.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, get_args

from twinpool.core.errors import InvalidValue
from twinpool.simulate.traces import BLOCK_TOKENS, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

Manner = Literal["servegen", "burstgpt", "poisson"]
MANNERS: tuple[Manner, ...] = get_args(Manner)

#: ServeGen (arXiv 2505.09999) and its data of one small model: coefficients of variation of the clients' times between
#: requests have a median of 1.2 and a 90th percentile of 4.5 (lognormal here).
_CLIENTS, _VARIATION, _SPREAD = 40, 1.2, math.log(4.5 / 1.2) / 1.2816
#: A few clients send most: the k-th has a share like k to this power (ours).
_SHARE = -1.2
#: Share of prompts from the tail, and its exponent: lengths are lognormal with a Pareto tail, answers exponential.
_TAIL, _EXPONENT, _WIDTH = 0.1, 2.0, 0.8
#: The rate over a day beside its mean: least at five in the morning, most at eight in the evening (the same data).
_NIGHT, _EVENING, _LEAST, _MOST = 5.0, 20.0, 0.65, 1.43
#: BurstGPT (arXiv 2401.17644): Gamma times between requests whose variation changes, lengths like Zipf's law. How far
#: and how often it changes, and the exponent, are ours.
_BURSTS, _CHANGES, _ZIPF = (1.0, 4.0), 600.0, 2.2
#: No prompt or answer is longer than so many times the mean.
_LONGEST = 30
#: Seconds for which a rate or a variation holds.
_STEP = 60.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What is drawn: requests/s over ``seconds``, mean tokens, and the share of each prompt that a client repeats."""

    rate: float
    seconds: float
    prompt: float = 2000.0
    answer: float = 250.0
    shared: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what nothing can be drawn from.

        Raises
        ------
        InvalidValue
            When a number is out of bounds.
        """
        if min(self.rate, self.seconds) <= 0 or min(self.prompt, self.answer) < 1 or not 0 <= self.shared < 1:
            raise InvalidValue(
                f"no requests can be drawn from {self}",
                "give a rate and a length above 0, means of at least one token, and a shared part from 0 to below 1",
            )


def generate(manner: Manner, shape: Shape, rng: Random) -> tuple[Request, ...]:
    """Return requests drawn in a manner."""
    makers: dict[Manner, Callable[[Shape, Random], list[Request]]] = {
        "servegen": _servegen, "burstgpt": _burstgpt, "poisson": _poisson,
    }  # fmt: skip
    return tuple(sorted(makers[manner](shape, rng), key=lambda request: request.arrival))


def day(second: float) -> float:
    """Return the rate at a second of the day over the day's mean, about: half a cosine down, half a cosine up."""
    hour = second / 3600 % 24
    since = (hour - _NIGHT) % 24
    up = _EVENING - _NIGHT
    phase = since / up if since < up else 1 + (since - up) / (24 - up)
    return _LEAST + (_MOST - _LEAST) * (1 - math.cos(math.pi * phase)) / 2


def renewals(rates: list[float], variation: Callable[[float], float], rng: Random) -> list[float]:
    """Return arrivals with Gamma times between them, for a rate (requests/s) in each step of a minute.

    ``variation`` is their coefficient of variation at a moment. Times are drawn for a rate of one and squeezed by the
    rate, so that a change of it does not wait for the next arrival.
    """
    work = [0.0, *accumulate(rate * _STEP for rate in rates)]
    done, moment = 0.0, 0.0
    found: list[float] = []
    while True:
        shape = variation(moment) ** -2
        done += rng.gammavariate(shape, 1 / shape)
        if done >= work[-1]:
            return found
        step = bisect_right(work, done) - 1
        moment = _STEP * step + (done - work[step]) / rates[step]
        found.append(moment)


def _steps(shape: Shape) -> int:
    return math.ceil(shape.seconds / _STEP)


def _servegen(shape: Shape, rng: Random) -> list[Request]:
    times = [day((number + 0.5) * _STEP) for number in range(_steps(shape))]
    mean = sum(times) / len(times)
    shares = [(number + 1) ** _SHARE for number in range(_CLIENTS)]
    sizes, answers = (_means(shares, rng) for _ in range(2))
    found: list[Request] = []
    for client, share in enumerate(shares):
        rates = [shape.rate * share / sum(shares) * factor / mean for factor in times]
        variation = max(0.5, _VARIATION * math.exp(_SPREAD * rng.gauss(0, 1)))
        moments = renewals(rates, lambda _, variation=variation: variation, rng)  # type: ignore[misc]
        for number, moment in enumerate(moments):
            prompt = _bounded(shape.prompt * sizes[client] * _length(rng), shape.prompt)
            written = _bounded(shape.answer * answers[client] * rng.expovariate(1), shape.answer)
            found.append(_request(moment, prompt, written, shape, client, number))
    return [request for request in found if request.arrival < shape.seconds]


def _means(shares: Sequence[float], rng: Random) -> list[float]:
    """Return how long what each client sends is beside the mean of all."""
    drawn = [math.exp(_WIDTH * rng.gauss(0, 1)) for _ in shares]
    mean = sum(share * one for share, one in zip(shares, drawn, strict=True)) / sum(shares)
    return [one / mean for one in drawn]


def _length(rng: Random) -> float:
    """Return a length with a mean of one: lognormal, or in the tail Pareto."""
    if rng.random() < _TAIL:
        return (_EXPONENT - 1) / _EXPONENT * 2 * rng.paretovariate(_EXPONENT)
    body = (1 - 2 * _TAIL) / (1 - _TAIL)
    return body * math.exp(_WIDTH * rng.gauss(0, 1) - _WIDTH**2 / 2)


def _burstgpt(shape: Shape, rng: Random) -> list[Request]:
    count = math.ceil(shape.seconds / _CHANGES)
    variations = [rng.uniform(*_BURSTS) for _ in range(count)]
    moments = renewals(
        [shape.rate] * _steps(shape), lambda moment: variations[min(count - 1, int(moment / _CHANGES))], rng
    )
    found = []
    for number, moment in enumerate(moments):
        prompt, answer = (_bounded(_zipf(mean, rng), mean) for mean in (shape.prompt, shape.answer))
        found.append(_request(moment, prompt, answer, shape, 0, number))
    return [request for request in found if request.arrival < shape.seconds]


def _zipf(mean: float, rng: Random) -> float:
    """Return a length whose frequency falls like a power of it (Lomax, Zipf's law with an offset)."""
    return mean * (_ZIPF - 1) * (math.pow(1 - rng.random(), -1 / _ZIPF) - 1)


def _poisson(shape: Shape, rng: Random) -> list[Request]:
    moment, found = 0.0, list[Request]()
    while (moment := moment + rng.expovariate(shape.rate)) < shape.seconds:
        prompt, answer = (_bounded(mean * rng.expovariate(1), mean) for mean in (shape.prompt, shape.answer))
        found.append(_request(moment, prompt, answer, shape, 0, len(found)))
    return found


def _bounded(size: float, mean: float) -> int:
    return max(1, min(round(size), round(_LONGEST * mean)))


def _request(moment: float, prompt: int, answer: int, shape: Shape, client: int, number: int) -> Request:
    """Return a request whose first blocks are the client's, the others nobody else's."""
    blocks = prompt // BLOCK_TOKENS
    common = int(blocks * shape.shared)
    # Each client has names of its own: even ones for what it repeats, odd ones for what it does not.
    first, own = client << 40, (client << 40) + (number << 14)
    names = [first + 2 * place for place in range(common)]
    names += [own + 2 * place + 1 for place in range(blocks - common)]
    return Request(moment, prompt, answer, tuple(names))
