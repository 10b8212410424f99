"""``twinpool top``: a pool at work in the terminal, or one look at it for a pipe, from the frames of ``live``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from twinpool.cli.forward import Forwards
from twinpool.cli.kubectl import Kubectl
from twinpool.cli.live.watcher import EVERY, Watcher
from twinpool.cli.options import Context, Format, Namespace  # noqa: TC001 - read at run time by cyclopts
from twinpool.cli.table import write_table, write_value
from twinpool.core.errors import TwinpoolError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_GROUPS = ("GROUP", "ROLE", "STATE", "REQUESTS", "TOKENS", "KV CACHE", "NOT PULLED")


def top(
    pool: Annotated[str, Parameter(help="Name of the pool.")],
    *,
    once: Annotated[bool, Parameter(negative="")] = False,
    seconds: float = 5.0,
    namespace: Namespace = "",
    context: Context = "",
    output: Format = "text",
) -> int:
    """Show where the requests of a pool are: its queue, ratio, latencies, handoffs, and every group.

    Ends with Ctrl-C on a terminal; in a pipe, with --once or with -o it looks twice and ends. Reads the pods' metrics
    through `kubectl port-forward`.

    Parameters
    ----------
    once
        Look once, on a terminal too.
    seconds
        Time between the two looks that rates and percentiles are of.
    """
    kubectl = Kubectl(namespace, context)
    with Forwards(kubectl) as forwards:
        watcher = Watcher(kubectl, forwards, pool)
        watcher.look(time.monotonic())
        if sys.stdout.isatty() and not once and output == "text":
            _follow(watcher)
            return 0
        time.sleep(seconds)
        watcher.look(time.monotonic())
    if output != "text":
        write_value(watcher.frame, output)
    else:
        sys.stdout.writelines(f"{line}\n" for line in summary(watcher.frame))
        sys.stdout.write("\n")
        write_table(_GROUPS, rows(watcher.frame))
    return 0


def _follow(watcher: Watcher) -> None:
    problem = ""
    with Live(console=Console(highlight=False), auto_refresh=False, screen=True) as screen:
        try:
            while True:
                screen.update(_screen(watcher.frame, problem), refresh=True)
                time.sleep(EVERY)
                try:
                    watcher.look(time.monotonic())
                    problem = ""
                except TwinpoolError as error:
                    problem = str(error)
        except KeyboardInterrupt:
            return


def _screen(frame: Mapping[str, Any], problem: str) -> Group:
    table = Table(*_GROUPS, box=None, pad_edge=False, header_style="bold")
    for row in rows(frame):
        table.add_row(*map(Text, row))
    last = [f"not up to date: {problem}"] if problem else []
    return Group(*map(Text, (*summary(frame), "")), table, *map(Text, ("", *last, "Ctrl-C ends")))


def summary(frame: Mapping[str, Any]) -> Sequence[str]:
    """Return the pool in a few lines: rates a second, latencies as median and 95th percentile of the window."""
    numbers, wanted = frame["numbers"], frame["objectives"]
    state = "ready" if frame["ready"] else f"not ready: {frame['message']}"
    invented = " (simulated engines: tokens and times are invented)" if frame["simulated"] else ""
    load = f"{numbers['requests']:.1f} requests/s, {numbers['failed']:.1f} failed/s"
    latency = f"{_pair(numbers['ttft'], wanted['ttft'])}; between tokens {_pair(numbers['itl'], wanted['itl'])}"
    handoffs = f"{numbers['remote']:.1f} remote/s, {numbers['local']:.1f} local/s, {numbers['bytes'] / 1e6:.1f} MB/s"
    return [
        f"{frame['pool']}: {frame['model']}, {state}{invented}",
        f"last {frame['window']:.0f} s: {load}, {numbers['waiting']:.0f} queued, {numbers['tokens']:.0f} tokens/s",
        f"first token {latency}",
        f"prefill to decode {frame['ratio'] or '-'}; handoffs: {handoffs}, {numbers['unpulled']:.0f} not pulled",
    ]


def rows(frame: Mapping[str, Any]) -> list[list[str]]:
    """Return a line for each group."""
    return [
        [
            group["name"],
            group["role"],
            f"{group['state']}{', avoided' if group['suspect'] else ''}",
            f"{group['requests']:.0f}",
            f"{group['tokens']:.0f}",
            "-" if group["kv"] is None else f"{group['kv']:.0%}",
            f"{group['unpulled']:.0f}",
        ]
        for group in frame["groups"]
    ]


def _pair(measured: Sequence[float | None], objective: float | None) -> str:
    median, high = (_time(value) for value in measured)
    promised = f" (promised: {_time(objective)})" if objective is not None else ""
    return f"{median} / {high}{promised}"


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"
