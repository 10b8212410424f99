"""What ``/debug`` shows: the state of the processes of a router, for somebody who looks at night.

No prompt, no header, no key: what is shown here may be pasted into a ticket.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from twinpool.router.shell.admin import JSON

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.core.protocol import RouterConfig
    from twinpool.router.logic.lag import Lag
    from twinpool.router.shell.children import Child
    from twinpool.router.shell.pool import Pool

_LAG_SECONDS = 1.0
_KIBI = 1024


async def follow_lag(lag: Lag) -> None:
    """Once a second, see how late the loop is."""
    while True:
        planned = time.monotonic() + _LAG_SECONDS
        await asyncio.sleep(_LAG_SECONDS)
        lag.woke(planned, time.monotonic())


def process_state(lag: Lag) -> dict[str, Any]:
    """Return what this process is at: its loop, its tasks by what they run, CPU and memory."""
    tasks = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
    return {
        "pid": os.getpid(),
        "lag": lag.state(),
        "tasks": dict(sorted(tasks.items())),
        "cpuSeconds": round(time.process_time(), 3),
        "peakMemoryBytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIBI,
    }


def pool_state(pool: Pool, clients: int) -> dict[str, Any]:
    """Return what a data process holds and thinks of workers, which are named by their pods."""
    known = pool.directory.known

    def named(by_id: dict[str, Any]) -> dict[str, Any]:
        return {known[name].pod if name in known else name: value for name, value in sorted(by_id.items())}

    return {
        "draining": pool.draining,
        "clients": clients,
        "running": pool.admission.running,
        "waiting": pool.admission.waiting,
        "holding": pool.admission.holding,
        "bodyBytes": pool.body_bytes,
        "idleConnections": named(pool.connections.idle()),
        "breaker": named(dict(pool.breaker.state(pool.loop.time()))),
        "inFlight": named({name: load.requests for name, load in pool.ledger.items()}),
        "prefillWorkers": len(pool.directory.prefill),
        "decodeWorkers": len(pool.directory.decode),
    }


def config_hash(config: RouterConfig) -> str:
    """Return what two routers with equal settings have in common; the settings themselves are the operator's."""
    return hashlib.sha256(config.to_json().encode()).hexdigest()[:12]


async def debug_page(
    children: Sequence[Child], number: int, config: RouterConfig, lag: Lag, more: dict[str, Any]
) -> tuple[int, str, bytes]:
    """Show the state of all processes; one that did not answer in time is null."""
    found = await asyncio.gather(*(child.look(number, decisions=False) for child in children))
    body = {
        "pool": config.pool,
        "config": config_hash(config),
        "policy": config.policy,
        "versions": {"twinpool": importlib.metadata.version("twinpool"), "python": platform.python_version()},
        "control": {"process": process_state(lag), **more},
        "processes": [None if one is None else one.state for one in found],
    }
    return 200, JSON, json.dumps(body).encode()


async def decisions_page(children: Sequence[Child], number: int) -> tuple[int, str, bytes]:
    """Show the last choices of each data process, which keeps them for a minute after each look.

    ``recording`` is false of a process that had kept none before: it does from now on. One that did not answer is null.
    """
    found = await asyncio.gather(*(child.look(number, decisions=True) for child in children))
    body = [
        None if one is None else {"recording": one.decisions is not None, "decisions": one.decisions or []}
        for one in found
    ]
    return 200, JSON, msgspec.json.encode({"processes": body})
