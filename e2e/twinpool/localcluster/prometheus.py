"""Prometheus for the tests of dashboards and alerts: built once from its Go module, run on a free port of loopback."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from twinpool.localcluster.build import GIB, FirstBuild, Target
from twinpool.localcluster.errors import ClusterError
from twinpool.localcluster.paths import cache_dir, sources_dir
from twinpool.localcluster.processes import die_with_parent
from twinpool.localcluster.toolchain import build_into, cache_key, is_complete
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from twinpool.localcluster.progress import Progress

_PACKAGE = "github.com/prometheus/prometheus/cmd"
FIRST_BUILD = FirstBuild(
    "github.com/prometheus/prometheus@*",
    2 * GIB,
    "building Prometheus from source, once: 2 to 6 minutes on two cores, 2 GB of disk",
)


def ensure_prometheus(progress: Progress) -> Path:
    """Return a folder with ``prometheus`` and ``promtool``, after building them when the cache lacks them.

    Without service discovery but files, and without web pages: half of the code, a third of the time.

    Raises
    ------
    ToolchainError
        They cannot be built; the message says what to do.
    """
    sources = sources_dir()
    targets = tuple(
        Target(name, sources / "prometheus", f"{_PACKAGE}/{name}", "-s -w", "remove_all_sd")
        for name in ("prometheus", "promtool")
    )
    folder = cache_dir() / "prometheus" / cache_key(targets, sources, ("prometheus",))
    if not is_complete(folder):
        build_into(folder, targets, FIRST_BUILD, progress)
    return folder


@dataclass(frozen=True)
class Series:
    """One line of an answer: its labels, and its values by time in seconds since 1970."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


class Prometheus:
    """A running server, asked over its HTTP interface."""

    def __init__(self, address: str) -> None:
        self.address = address

    def query(self, expression: str) -> list[Series]:
        """Return what an expression is now."""
        return _series(self._get("query", {"query": expression})["data"])

    def query_range(self, expression: str, begin: float, end: float, step: float) -> list[Series]:
        """Return what an expression was from ``begin`` to ``end`` (seconds since 1970), every ``step`` seconds."""
        parameters = {"query": expression, "start": str(begin), "end": str(end), "step": str(step)}
        return _series(self._get("query_range", parameters)["data"])

    def _get(self, path: str, parameters: Mapping[str, str]) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")
            raise ClusterError(f"Prometheus refuses {parameters['query']}: {said}", "mend the expression") from None


def _series(data: Mapping[str, Any]) -> list[Series]:
    if data["resultType"] == "scalar":
        at, value = data["result"]
        return [Series({}, ((at, float(value)),))]
    return [
        Series(item["metric"], tuple((at, float(value)) for at, value in item.get("values", [item.get("value")])))
        for item in data["result"]
    ]


@contextlib.contextmanager
def running(
    binaries: Path, folder: Path, targets: Mapping[tuple[tuple[str, str], ...], Sequence[str]], seconds: int = 1
) -> Iterator[Prometheus]:
    """Run a server that scrapes ``targets`` (addresses by the labels that they get) every so many ``seconds``."""
    (folder / "targets.json").write_text(
        json.dumps([{"targets": list(addresses), "labels": dict(labels)} for labels, addresses in targets.items()])
    )
    scrape = {"job_name": "twinpool", "file_sd_configs": [{"files": [str(folder / "targets.json")]}]}
    config = {"global": {"scrape_interval": f"{seconds}s"}, "scrape_configs": [scrape]}
    (folder / "prometheus.json").write_text(json.dumps(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        str(binaries / "prometheus"),
        f"--config.file={folder / 'prometheus.json'}",
        f"--web.listen-address={address}",
    ]
    command += [f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die_with_parent())
    try:
        wait_until(lambda: _ready(address), 60, f"Prometheus is ready; its log: {folder / 'log'}")
        yield Prometheus(address)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def _ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False
