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
    """Requests per second, the means of prompts and answers (exponential), and the share of prompts that is cached."""

    rate: float
    prompt: float = 3000.0
    output: float = 200.0
    hit: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """``slow``: how much longer engines take than the model says; ``start``: how long a group takes to serve.

    ``loss``: when half of the groups of both roles are lost; they are made anew.
    """

    name: str
    at: Callable[[float], Moment]
    slow: float = 1.0
    start: float = 60.0
    budget: int | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at: float
    prompt: int
    output: int
    #: Prompt tokens that need no computing.
    cached: int = 0


def arrivals(workload: Workload, seed: int) -> list[Arrival]:
    """Draw the requests of one run (Poisson, thinned to the rate of each moment)."""
    dice, found, now = Random(seed), [], 0.0
    most = max(workload.at(t).rate for t in range(0, int(LENGTH), 5)) * 1.01
    while (now := now + dice.expovariate(most)) < LENGTH:
        moment = workload.at(now)
        if dice.random() * most < moment.rate:
            prompt, output = dice.expovariate(1 / moment.prompt), dice.expovariate(1 / moment.output)
            size = max(50, min(20_000, int(prompt)))
            found.append(Arrival(now, size, max(2, min(2000, int(output))), int(size * moment.hit)))
    return found


def _diurnal(now: float) -> Moment:
    return Moment(12.0 - 7.5 * math.cos(2 * math.pi * now / LENGTH))


def _shift(now: float) -> Moment:
    return Moment(12.0, 1500.0, 500.0) if now < LENGTH / 2 else Moment(12.0, 5000.0, 80.0)


def _bursts(now: float) -> Moment:
    return Moment(18.0 if now % 800 < 240 else 6.0)


def _ramp(now: float) -> Moment:
    return Moment(2.0 * 10 ** min(1.0, max(0.0, (now - 600) / 600)))


def _hits(now: float) -> Moment:
    return Moment(14.0, 5000.0, 120.0, hit=0.75 if 600 <= now < 1500 else 0.1)


#: None of them was used while the planner was designed; they are run from seeds that were not either.
WORKLOADS = (
    Workload("diurnal", _diurnal),
    Workload("length shift", _shift),
    Workload("hit rate shift", _hits),
    Workload("bursts x3 for 240 s", _bursts),
    Workload("ramp x10", _ramp),
    Workload("ramp x10, starts take 180 s", _ramp, start=180.0),
    Workload("ramp x10, starts take 420 s", _ramp, start=420.0),
    Workload("diurnal, engines 40 % slower", _diurnal, slow=1.4),
    Workload("diurnal, half of the groups lost", _diurnal, loss=1300.0),
    Workload("diurnal, tight budget", _diurnal, budget=10),
)


def _climb(now: float) -> Moment:
    return Moment(3.0 + 12.0 * min(1.0, max(0.0, (now - 300) / 900)))


def _steep(now: float) -> Moment:
    return Moment(2.5 * 6 ** min(1.0, max(0.0, (now - 400) / 500)), 2500.0, 220.0)


def _stairs(now: float) -> Moment:
    return Moment((4.0, 9.0, 14.0, 7.0)[min(3, int(now / 600))], 2200.0, 260.0)


def _wave(now: float) -> Moment:
    return Moment(9.0 - 4.0 * math.cos(2 * math.pi * now / 1200), 3500.0, 150.0)


def _drift(now: float) -> Moment:
    share = min(1.0, max(0.0, (now - 800) / 600))
    return Moment(10.0, 1800.0 + 3000.0 * share, 380.0 - 250.0 * share)


def _spikes(now: float) -> Moment:
    return Moment(20.0 if now % 600 >= 420 else 8.0, 2200.0, 260.0)


def _calm(now: float) -> Moment:
    return Moment(11.0 + 2.0 * math.sin(2 * math.pi * now / 1600), 2600.0, 240.0)


def _surges(now: float) -> Moment:
    return Moment(17.0 if 500 <= now % 1000 < 620 else 5.0, 2400.0, 240.0)


def _switch(now: float) -> Moment:
    return Moment(9.0, 1300.0, 420.0) if now < 1000 else Moment(9.0, 4200.0, 100.0)


def _forgotten(now: float) -> Moment:
    return Moment(11.0, 4500.0, 150.0, hit=0.65 if now < 1100 else 0.15)


#: What constants are chosen on (seeds below 1000).
DESIGN = (
    Workload("climb x5 over 900 s, starts take 120 s", _climb, start=120.0),
    Workload("climb x5 over 900 s, starts take 300 s", _climb, start=300.0),
    Workload("stairs", _stairs, start=90.0),
    Workload("wave of 1200 s", _wave),
    Workload("wave of 1200 s, engines 25 % slower, starts take 150 s", _wave, slow=1.25, start=150.0),
    Workload("lengths drift", _drift, start=90.0),
    Workload("spikes x2.5 for 180 s, starts take 75 s", _spikes, start=75.0),
    Workload("calm, half of the groups lost, starts take 90 s", _calm, start=90.0, loss=1000.0),
    Workload("climb x6 over 500 s, starts take 350 s", _steep, start=350.0),
    Workload("wave of 1200 s, half of the groups lost", _wave, loss=700.0),
    Workload("calm, half of the groups lost, starts take 240 s", _calm, start=240.0, loss=900.0),
    Workload("climb x6 over 500 s, starts take 600 s", _steep, start=600.0),
    Workload("surges x3.4 for 120 s", _surges),
    Workload("lengths switch", _switch),
    Workload("hit rate falls, starts take 90 s", _forgotten, start=90.0),
)


def _long_answers(now: float) -> Moment:
    return Moment(30.0, 2500.0, 600.0 if now % 600 >= 420 else 200.0)


def _long_prompts(now: float) -> Moment:
    return Moment(30.0, 3000.0 if now % 600 >= 420 else 1200.0, 500.0)


def _thrice(now: float) -> Moment:
    return Moment(30.0 if 800 <= now % 1200 < 1040 else 10.0, 2500.0, 240.0)


def _in_turn(now: float) -> Moment:
    return Moment(30.0, 3000.0 if now % 800 >= 600 else 1500.0, 600.0 if 200 <= now % 800 < 380 else 250.0)


#: Bursts that are shorter than a start: what levers are chosen on, beside :data:`DESIGN` (seeds below 1000).
BURSTS = (
    Workload("answers x3 for 180 s, starts take 180 s", _long_answers, start=180.0),
    Workload("prompts x2.5 for 180 s, starts take 180 s", _long_prompts, start=180.0),
    Workload("requests x3 for 240 s, starts take 180 s", _thrice, start=180.0),
    Workload("longer answers and longer prompts in turn, starts take 180 s", _in_turn, start=180.0),
)
