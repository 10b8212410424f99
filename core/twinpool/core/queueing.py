"""How long work waits for servers: the closed forms by which pools and links are sized. Pure; times in seconds.

Planning at a utilisation of 1 (rate times service time) is wrong by construction: the wait there has no bound. These
forms say how far below it to stay.
"""

from __future__ import annotations

import math


def erlang_c(servers: int, load: float) -> float:
    """Return the probability that work has to wait, with Poisson arrivals and ``load`` = rate x mean service time.

    1.0 when the load is not below the number of servers. Erlang's C by the recursion of his B, which neither overflows
    nor loses digits (Cooper, Introduction to Queueing Theory, 1981).
    """
    if load >= servers:
        return 1.0
    if load <= 0:
        return 0.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    utilisation = load / servers
    return blocked / (1 - utilisation + utilisation * blocked)


def mean_wait(servers: int, rate: float, service: float, arrivals: float = 1.0, services: float = 1.0) -> float:
    """Return the mean wait of G/G/c; infinite at or above capacity.

    ``arrivals`` and ``services`` are squared coefficients of variation. Allen and Cunneen's approximation, which is
    exact for M/M/c, and for one server with Poisson arrivals is Pollaczek and Khinchine's formula.
    """
    load = rate * service
    if load >= servers:
        return math.inf
    if load <= 0:
        return 0.0
    return erlang_c(servers, load) * service / (servers - load) * (arrivals + services) / 2


def wait_exceeds(
    limit: float, servers: int, rate: float, service: float, arrivals: float = 1.0, services: float = 1.0
) -> float:
    """Return the probability that the wait is longer than ``limit``.

    The tail of a wait is close to exponential with the mean of those who wait; exact for M/M/c.
    """
    mean = mean_wait(servers, rate, service, arrivals, services)
    if mean == 0:
        return 0.0
    if limit < 0 or math.isinf(mean):
        return 1.0
    waits = erlang_c(servers, rate * service)
    return waits * math.exp(-limit * waits / mean)
