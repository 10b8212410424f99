"""Work that arrives at a pool over 40 minutes, and what is special about it. Times in seconds, sizes in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Length of a run.
LENGTH = 2400.0


@dataclass(frozen=True, slots=True)
class Moment:
    """Requests per second, and the means of prompts and answers (exponential)."""

    rate: float
    prompt: float = 3000.0
    output: float = 200.0


@dataclass(frozen=True, slots=True)
class Workload:
    """``slow``: how much longer engines take than the model says; ``start``: how long a group takes to serve."""

    name: str
    at: Callable[[float], Moment]
    slow: float = 1.0
    start: float = 60.0
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at: float
    prompt: int
    output: int


def arrivals(workload: Workload, seed: int) -> list[Arrival]:
    """Draw the requests of one run (Poisson, thinned to the rate of each moment)."""
    dice, found, now = Random(seed), [], 0.0
    most = max(workload.at(t).rate for t in range(0, int(LENGTH), 5)) * 1.01
    while (now := now + dice.expovariate(most)) < LENGTH:
        moment = workload.at(now)
        if dice.random() * most < moment.rate:
            prompt, output = dice.expovariate(1 / moment.prompt), dice.expovariate(1 / moment.output)
            found.append(Arrival(now, max(50, min(20_000, int(prompt))), max(2, min(2000, int(output)))))
    return found


def _diurnal(now: float) -> Moment:
    return Moment(12.0 - 7.5 * math.cos(2 * math.pi * now / LENGTH))


def _shift(now: float) -> Moment:
    return Moment(12.0, 1500.0, 500.0) if now < LENGTH / 2 else Moment(12.0, 5000.0, 80.0)


def _bursts(now: float) -> Moment:
    return Moment(18.0 if now % 800 < 240 else 6.0)


def _ramp(now: float) -> Moment:
    return Moment(2.0 * 10 ** min(1.0, max(0.0, (now - 600) / 600)))


#: None of them was used while the planner was designed; they are run from seeds that were not either.
WORKLOADS = (
    Workload("diurnal", _diurnal),
    Workload("length shift", _shift),
    Workload("bursts x3 for 240 s", _bursts),
    Workload("ramp x10", _ramp),
    Workload("ramp x10, starts take 180 s", _ramp, start=180.0),
    Workload("diurnal, engines 40 % slower", _diurnal, slow=1.4),
    Workload("diurnal, tight budget", _diurnal, budget=10),
)
