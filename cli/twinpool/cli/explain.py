"""``twinpool explain``: why a pool is slow, from its own figures; or where its groups are, or how many, and why."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from twinpool.cli.choices import asked, told
from twinpool.cli.forward import Forwards
from twinpool.cli.kubectl import Kubectl
from twinpool.cli.live.watcher import Watcher
from twinpool.cli.options import Context, Format, Namespace  # noqa: TC001 - read at run time by cyclopts
from twinpool.cli.placement import Links, TopologyName, explain_placement
from twinpool.cli.pools import observe
from twinpool.cli.scaling import explained
from twinpool.cli.slowness import observation
from twinpool.cli.table import write_value
from twinpool.core.bottleneck import MIN_SECONDS, find
from twinpool.core.errors import InvalidValue
from twinpool.core.topology import AUTO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.core.bottleneck import Finding, Observation

_VERDICTS = {
    True: "the pool keeps them; nothing needs to be done",
    False: "the pool misses them",
    None: "none are set, so nobody can say whether this is slow",
}


def explain(
    pool: Annotated[str, Parameter(help="Name of the pool.")],
    *,
    placement: Annotated[bool, Parameter(help="Say where its groups are and why, instead.", negative="")] = False,
    scaling: Annotated[
        bool, Parameter(help="Say how many groups it should have and why, instead.", negative="")
    ] = False,
    routing: Annotated[
        bool, Parameter(help="Say what its routers are at and how they chose workers, instead.", negative="")
    ] = False,
    seconds: Annotated[float, Parameter(help="How long to watch the pool.")] = 30.0,
    namespace: Namespace = "",
    kube_context: Context = "",
    topology: TopologyName = AUTO,
    links: Links = "",
    output: Format = "text",
) -> int:
    """Watch a pool for a while and say what makes it slow: the stage, what it waits for, what helps and what it costs.

    The figures are those of its routers and engines, by `kubectl port-forward`. Ends with 1 when too little was asked
    of the pool meanwhile. With --placement: where the groups are, why pending ones wait, and how good that is beside
    the best layout. With --scaling: how many groups the arriving work needs, from which figures, and the last changes.
    With --routing: queue, breakers and lag of each router, and its last choices with what each worker would have cost.

    Raises
    ------
    InvalidValue
        When two things are asked for, or the time is too short to say anything.
    """
    if placement + scaling + routing > 1:
        raise InvalidValue("--placement, --scaling and --routing are different answers", "ask for one at a time")
    kubectl = Kubectl(namespace, kube_context)
    if scaling:
        sys.stdout.write(explained(observe(kubectl, pool)[0].pool, output))
        return 0
    if placement:
        return explain_placement(kubectl, pool, topology, links, output)
    if routing:
        sys.stdout.write(told(asked(kubectl, pool, seconds), output))
        return 0
    if seconds < MIN_SECONDS:
        raise InvalidValue(f"--seconds {seconds:g} is too short", f"watch for at least {MIN_SECONDS:g} seconds")
    seen = watch(kubectl, pool, seconds)
    found = find(seen)
    if output != "text":
        write_value({"observation": asdict(seen), "finding": asdict(found)}, output)
    else:
        sys.stdout.writelines(f"{line}\n" for line in lines(pool, seen, found))
    return 1 if found.cause == "not enough data" else 0


def watch(kubectl: Kubectl, pool: str, length: float) -> Observation:
    """Return what a pool did within so many seconds."""
    with Forwards(kubectl) as forwards:
        watcher = Watcher(kubectl, forwards, pool)
        before = watcher.snapshot(time.monotonic())
        with Console(stderr=True).status(f"watching {pool} for {length:g} s"):
            time.sleep(max(before.at + length - time.monotonic(), 0.0))
        return observation(before, watcher.snapshot(time.monotonic()))


def lines(pool: str, seen: Observation, found: Finding) -> Iterator[str]:
    """Yield the finding in words."""
    yield f"{pool}: {seen.requests:.0f} requests in {seen.window:.0f} s"
    if found.cause == "not enough data":
        yield f"not enough data: {found.technique}"
    else:
        part = f", {found.share:.0%} of the time to the first token" if found.share is not None else ""
        yield f"slowest:       {found.stage}{part} ({found.cause})"
        yield f"objectives:    {_VERDICTS[found.within_objectives]}"
        yield f"waits for:     {found.resource}"
        yield f"{'would help:   ' if found.within_objectives else 'what helps:   '} {found.technique}"
        yield f"what it costs: {found.cost}"
    yield "evidence:"
    yield from (f"  {item}" for item in found.evidence)
    yield "do not conclude:"
    yield from (f"  {item}" for item in found.caution)
