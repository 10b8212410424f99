"""``twinpool bench``: the command line of it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - cyclopts reads annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from twinpool.cli.bench import arrivals
from twinpool.cli.bench.client import Endpoint, closed_loop, open_loop
from twinpool.cli.bench.judge import LATE_SECONDS, Objectives, judge, passed
from twinpool.cli.bench.load import Bounds, Lengths, closed_load, open_load, replayed_load
from twinpool.cli.kubectl import Kubectl
from twinpool.cli.options import Context, Format, Namespace  # noqa: TC001 - read at run time by cyclopts
from twinpool.cli.pools import RESOURCE
from twinpool.cli.table import write_table, write_value
from twinpool.core.errors import TwinpoolError
from twinpool.core.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.cli.bench.arrivals import Planned
    from twinpool.cli.bench.judge import Report, Sample
    from twinpool.cli.bench.load import Load

_HEADERS = ("", "mean", "p50", "p90", "p95", "p99", "max")
_ROWS = {"ttft": "TTFT", "itl": "ITL", "gap": "between events", "e2e": "whole answer"}


def bench(
    url: Annotated[str, Parameter(help="Address of the endpoint, such as http://localhost:8000.")],
    *,
    rate: Annotated[float | None, Parameter(help="Requests a second, sent whether or not others are answered.")] = None,
    concurrency: Annotated[int | None, Parameter(help="Instead: so many requests running at all times.")] = None,
    trace: Annotated[Path | None, Parameter(help="Instead: a trace, as `twinpool simulate` reads.")] = None,
    speed: Annotated[float, Parameter(help="Multiple of the trace's rate.")] = 1.0,
    spacing: Annotated[Literal["poisson", "constant"], Parameter(name="--arrivals", help="Of --rate.")] = "poisson",
    requests: Annotated[int | None, Parameter(help="Requests in all; default: 100, or those of the trace.")] = None,
    seconds: Annotated[float | None, Parameter(help="Send for so long; running requests are waited for.")] = None,
    prompt_tokens: Annotated[int, Parameter(help="Length of each prompt, which is random token ids.")] = 512,
    shared_tokens: Annotated[int, Parameter(help="Of these, tokens that all prompts begin with.")] = 0,
    output_tokens: Annotated[int, Parameter(help="Length of each answer.")] = 128,
    model: Annotated[str, Parameter(help="Model to ask for; default: the first that is served.")] = "",
    ttft: Annotated[str, Parameter(help="Objective for the time to the first token, such as 800ms.")] = "",
    itl: Annotated[str, Parameter(help="Objective for the mean time between tokens of an answer.")] = "",
    percentile: Annotated[
        float | None, Parameter(help="Share of requests, in percent, that must keep both; default: 99.")
    ] = None,
    pool: Annotated[str, Parameter(help="Take the objectives of this pool; the options above win.")] = "",
    namespace: Namespace = "",
    context: Context = "",
    api_key_env: Annotated[str, Parameter(help="Environment variable that holds the API key.")] = "TWINPOOL_API_KEY",
    timeout: Annotated[str, Parameter(help="Longest time for one request.")] = "10m",
    seed: Annotated[int, Parameter(help="Same seed, same requests.")] = 0,
    output: Format = "text",
) -> int:
    """Put load on an endpoint and say what users would have felt: TTFT, time between tokens, goodput, errors by kind.

    One of --rate, --concurrency and --trace. With --rate and --trace the loop is open: requests come when they come,
    and each time counts from when its request should have been sent. Any OpenAI-compatible endpoint will do that takes
    token ids as prompts and, as vLLM does, `ignore_eos`.

    Exit code 1: too few requests kept the objectives; without objectives, some request was not answered.
    """
    bounds = Bounds(requests, seconds)
    lengths = Lengths(prompt_tokens, shared_tokens, output_tokens)
    if sum(kind is not None for kind in (rate, concurrency, trace)) != 1:
        raise TwinpoolError("how much load is not clear", "give one of --rate, --concurrency and --trace")
    if trace is not None:
        load = replayed_load(trace, speed, bounds)
    elif concurrency is not None:
        load = closed_load(concurrency, lengths, bounds)
    else:
        load = open_load(rate or 0, spacing, lengths, bounds, seed)
    wanted = _objectives(ttft, itl, percentile, Kubectl(namespace, context), pool)
    endpoint = Endpoint(url, model, os.environ.get(api_key_env, ""), parse_duration(timeout))
    samples = asyncio.run(_run(endpoint, load, seed))
    if not samples:
        raise TwinpoolError("no request came to its end", "let it run for longer")
    report = judge(samples, wanted)
    if output == "text":
        _write(url, endpoint.model, load, report, wanted)
    else:
        write_value(_value(url, endpoint.model, load, report, wanted), output)
    return 0 if passed(report, wanted) and len(samples) == len(load.plan) else 1


def _objectives(ttft: str, itl: str, percentile: float | None, kubectl: Kubectl, pool: str) -> Objectives:
    if pool:
        said = kubectl.get(RESOURCE, pool)["spec"].get("objectives") or {}
        ttft, itl, percentile = (
            ttft or said.get("ttft") or "", itl or said.get("itl") or "", percentile or said.get("percentile")
        )  # fmt: skip
        if not ttft and not itl:
            raise TwinpoolError(f"pool {pool} has no objectives", "give --ttft and --itl")
    share = 99 if percentile is None else percentile
    if not 0 < share <= 100:
        raise TwinpoolError(f"--percentile {percentile} cannot be", "give a number above 0, up to 100")
    bounds = [parse_duration(text) if text else math.inf for text in (ttft, itl)]
    return Objectives(bounds[0], bounds[1], share / 100)


async def _run(endpoint: Endpoint, load: Load, seed: int) -> list[Sample]:
    """Send all of it and return what came to an end; Ctrl-C gives up what still runs."""
    samples: list[Sample] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    async with endpoint:
        await endpoint.find_model()

        async def send(number: int, request: Planned, due: float) -> Sample:
            return await endpoint.send(arrivals.prompt_ids(request, number, seed), request.output, due)

        bars = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        with bars as progress:
            bar = progress.add_task("requests", total=len(load.plan))

            def told(sample: Sample) -> None:
                samples.append(sample)
                failed = sum(bool(one.error) for one in samples[-1000:])
                progress.update(bar, completed=len(samples), description=f"{failed} failed" if failed else "requests")

            if load.concurrency:
                running = asyncio.ensure_future(closed_loop(load.plan, load.concurrency, send, told))
            else:
                running = asyncio.ensure_future(open_loop(load.plan, send, told))
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, running.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await running
    return samples


def _value(url: str, model: str, load: Load, report: Report, wanted: Objectives) -> dict[str, Any]:
    promised = {name: value for name, value in asdict(wanted).items() if value < math.inf}
    what = {"url": url, "model": model, "load": load.words, "openLoop": not load.concurrency, "planned": len(load.plan)}
    figures = {"".join(_camel(name)): value for name, value in asdict(report).items()}
    return {**what, "objectives": promised, **figures, "passed": passed(report, wanted)}


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(word.capitalize() for word in others)


def _write(url: str, model: str, load: Load, report: Report, wanted: Objectives) -> None:
    write = sys.stdout.write
    write(f"{url}, {model}: {load.words}\n")
    write(
        f"answered {report.answered} of {report.requests} in {report.seconds:.1f} s: {report.request_rate:.2f} "
        f"requests/s, {report.output_rate:.0f} tokens/s written\n"
    )
    for kind, count in report.errors.items():
        write(f"failed {count}: {kind}\n")
    if report.answered:
        write("\n")
        write_table(_HEADERS, [_row(name, report.times[name]) for name in _ROWS if report.times[name]])
    if wanted.given:
        bounds = [
            f"{name} <= {_time(value)}"
            for name, value in (("TTFT", wanted.ttft), ("ITL", wanted.itl))
            if value < math.inf
        ]
        verdict = "kept" if passed(report, wanted) else "missed"
        write(
            f"\ngoodput {report.goodput:.2f} requests/s with {' and '.join(bounds)}: {report.attained:.1%} of all "
            f"requests, {wanted.share:.0%} wanted: {verdict}\n"
        )
    if load.concurrency:
        write("\nclosed loop: nobody came while others waited, so queues are not in these figures; --rate has them\n")
    if report.late > LATE_SECONDS:
        write(f"\nsent {_time(report.late)} late at p99: this machine is part of the figures; send less from it\n")


def _row(name: str, summary: Mapping[str, float]) -> list[str]:
    return [_ROWS[name], *(_time(summary[column]) for column in _HEADERS[1:])]


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
