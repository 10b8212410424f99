"""The real router in front of workers of this machine, without Kubernetes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any

from twinpool.core.protocol import ROUTER_ADMIN_PORT, ROUTER_CONFIG_ENV, RouterConfig
from twinpool.localcluster.waiting import wait_until
from twinpool.localengine.pod import end

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


@contextlib.contextmanager
def routing(folder: Path, ip: str, workers: Sequence[Mapping[str, Any]], **settings: Any) -> Iterator[str]:
    """Run a router at ``ip`` while the block runs, once it admits all ``workers`` (as in a list of endpoints).

    Yield its address for clients; ``settings`` are those of :class:`RouterConfig`.
    """
    listed = folder / "workers.json"
    listed.write_text(json.dumps(workers))
    config = RouterConfig("p", "n", ("tiny",), drain_timeout=5.0, **settings)
    environment = {**os.environ, ROUTER_CONFIG_ENV: config.to_json(), "POD_IP": ip}
    command = [sys.executable, "-m", "twinpool.router", "--host", ip, "--endpoints", str(listed)]
    process = subprocess.Popen(command, env=environment)
    try:
        wait_until(lambda: _admitted(ip) == len(workers), 60, "the router admits the workers")
        yield f"http://{ip}:8000"
    finally:
        end(process)


def admin(ip: str, page: str) -> Any:
    """Return an admin page of the router at ``ip``."""
    with urllib.request.urlopen(f"http://{ip}:{ROUTER_ADMIN_PORT}/admin/{page}", timeout=10) as answer:
        return json.load(answer)


def _admitted(ip: str) -> int:
    try:
        found = admin(ip, "endpoints")["endpoints"]
    except OSError:
        return 0
    return sum(entry["admitted"] for entry in found)
