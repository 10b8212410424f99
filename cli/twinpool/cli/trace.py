"""``twinpool trace``: requests in the manner of a published workload, where no trace is at hand."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - cyclopts reads annotations when it runs
from random import Random
from statistics import fmean
from typing import Annotated

from cyclopts import Parameter

from twinpool.core.errors import TwinpoolError
from twinpool.core.units import parse_duration
from twinpool.simulate.generators import Manner, Shape, generate
from twinpool.simulate.traces import line_of


def trace(
    manner: Annotated[Manner, Parameter(help="servegen, burstgpt or poisson.")],
    /,
    *,
    rate: Annotated[float, Parameter(help="Requests per second, on average.")] = 2.0,
    length: Annotated[str, Parameter(help="How long requests come.")] = "10m",
    prompt: Annotated[float, Parameter(help="Mean tokens of a prompt.")] = 2000.0,
    answer: Annotated[float, Parameter(help="Mean tokens of an answer.")] = 250.0,
    shared: Annotated[float, Parameter(help="Part of each prompt that its client repeats, 0 to below 1.")] = 0.0,
    seed: Annotated[int, Parameter(help="Same seed, same requests.")] = 0,
    out: Annotated[Path | None, Parameter(help="File to write; default: standard output.")] = None,
) -> int:
    """Write requests that are drawn in the manner of a published workload, one JSON object a line (Mooncake's format).

    servegen: some forty clients, few of which send most, each with bursts and lengths of its own; the rate follows the
    time of day, from midnight on. burstgpt: times between requests whose variation changes, lengths with a heavy tail.
    poisson: no bursts, exponential lengths. The shapes are published, some constants are ours: nobody's traffic.
    """
    requests = generate(manner, Shape(rate, parse_duration(length), prompt, answer, shared), Random(seed))  # noqa: S311 - no secret
    text = "".join(f"{line_of(request, number)}\n" for number, request in enumerate(requests))
    if out is None:
        sys.stdout.write(text)
    else:
        try:
            out.write_text(text)
        except OSError as error:
            raise TwinpoolError(f"{out} cannot be written: {error.strerror}", "give another file to --out") from None
    if requests:
        means = [fmean(values) for values in ([r.prompt for r in requests], [r.output for r in requests])]
        sys.stderr.write(f"{len(requests)} requests, {means[0]:.0f} and {means[1]:.0f} tokens on average\n")
    else:
        sys.stderr.write("no request came in that time; raise --rate or --length\n")
    return 0
