"""The requests of a run, from what the command line says; wrong wishes are refused by the option's name."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from twinpool.cli.bench import arrivals
from twinpool.core.errors import TwinpoolError
from twinpool.simulate.traces import read

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twinpool.cli.bench.arrivals import Planned

#: Requests where neither their number nor a time is given.
_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: the requests, in words, and for a closed loop how many at once (else 0)."""

    plan: Sequence[Planned]
    words: str
    concurrency: int = 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of each prompt, of what all prompts begin with, and of each answer."""

    prompt: int
    shared: int
    output: int

    def __post_init__(self) -> None:
        """Refuse lengths that cannot be."""
        _positive("--prompt-tokens", self.prompt)
        _positive("--output-tokens", self.output)
        if not 0 <= self.shared <= self.prompt:
            raise TwinpoolError(
                f"--shared-tokens {self.shared} cannot be", f"give 0 to {self.prompt}, the length of the prompts"
            )

    def __str__(self) -> str:
        shared = f", {self.shared} of them shared," if self.shared else ""
        return f"prompts of {self.prompt}{shared} and answers of {self.output} tokens"


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a run ends: after so many requests, or when none is sent any more; None: not said."""

    requests: int | None
    seconds: float | None

    def __post_init__(self) -> None:
        """Refuse bounds that cannot be."""
        _positive("--requests", self.requests)
        _positive("--seconds", self.seconds)

    def most(self, default: int) -> int:
        """Return the greatest number of requests; ``default`` holds where no bound is given."""
        return self.requests or (default if self.seconds is None else sys.maxsize)

    @property
    def until(self) -> float:
        """Return the seconds after which nothing is sent."""
        return math.inf if self.seconds is None else self.seconds


def open_load(rate: float, spacing: str, lengths: Lengths, bounds: Bounds, seed: int) -> Load:
    """Return requests that come ``rate`` times a second, ``poisson`` or ``constant``."""
    _positive("--rate", rate)
    moments = arrivals.constant(rate) if spacing == "constant" else arrivals.poisson(rate, Random(seed))  # noqa: S311
    plan = arrivals.planned(
        moments, lengths.prompt, lengths.output, lengths.shared, most=bounds.most(_REQUESTS), seconds=bounds.until
    )
    if not plan:
        raise TwinpoolError(f"no request comes within {bounds.seconds} s", "raise --rate or --seconds")
    return Load(plan, f"{rate:g}/s ({spacing}), {lengths}")


def closed_load(concurrency: int, lengths: Lengths, bounds: Bounds) -> Load:
    """Return requests of which ``concurrency`` run at all times."""
    _positive("--concurrency", concurrency)
    if bounds.seconds is not None:
        raise TwinpoolError("--seconds goes with --rate or --trace", "give --requests beside --concurrency")
    plan = arrivals.planned(
        arrivals.at_once(), lengths.prompt, lengths.output, lengths.shared,
        most=bounds.most(_REQUESTS), seconds=bounds.until,
    )  # fmt: skip
    return Load(plan, f"{concurrency} at all times (closed loop), {lengths}", concurrency)


def replayed_load(trace: Path, speed: float, bounds: Bounds) -> Load:
    """Return the requests of a trace at ``speed`` times its rate; lines that cannot be read are left out and said."""
    _positive("--speed", speed)
    try:
        with trace.open() as lines:
            found, problems = read(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise TwinpoolError(f"{trace} cannot be read: {error}", "give a text file with one request a line") from None
    plan = arrivals.replayed(found, speed, most=bounds.most(sys.maxsize), seconds=bounds.until)
    if not plan:
        why = f": {problems[0]}" if problems else ""
        raise TwinpoolError(f"{trace} holds no request{why}", "docs/scaling.md says which formats are read")
    if problems:
        sys.stderr.write(f"left out: {len(problems)} lines of {trace}, the first since {problems[0]}\n")
    return Load(plan, f"{trace.name} at {speed:g} times its rate")


def _positive(option: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise TwinpoolError(f"{option} {value} cannot be", "give a number above 0")
