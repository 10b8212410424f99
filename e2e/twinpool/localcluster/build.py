"""Building Go programs with progress, and turning what the Go tool says into what the user can do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.localcluster.errors import ToolchainError
from twinpool.localcluster.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.localcluster.progress import Progress

GIB = 1 << 30
REBUILD_BYTES = GIB
_HEARTBEAT = 10.0
_NO_NETWORK = re.compile(
    r"dial tcp|no such host|proxyconnect|i/o timeout|connection refused|TLS handshake|unexpected EOF|cannot find module"
)
_PACKAGE = re.compile(r"[\w.~/+-]+")


@dataclass(frozen=True)
class Target:
    """One program: its file name, the folder of its module, its package, linker flags and build tags."""

    name: str
    module: Path
    package: str
    ldflags: str
    tags: str = ""


@dataclass(frozen=True)
class FirstBuild:
    """What it takes while Go's module cache holds nothing that matches ``module``: bytes of disk, and a word before."""

    module: str
    disk: int
    message: str


def go_environment() -> dict[str, str]:
    """Return the environment for Go: the user's, without what would change the result."""
    env = {k: v for k, v in os.environ.items() if k not in ("GOFLAGS", "GOOS", "GOARCH", "GOEXPERIMENT", "GO111MODULE")}
    return env | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off"}


def check_disk(folders: Mapping[str, Path], need: int) -> None:
    """Refuse when a file system has less than ``need`` bytes free; ``folders`` are by the variable that moves them."""
    for variable, folder in folders.items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if free < need:
            raise ToolchainError(
                f"building needs {need / GIB:.0f} GiB of disk in {folder}, {free / GIB:.1f} GiB are free",
                f"make room there, or set {variable} to a folder on a larger disk",
            )


def build(go: Path, targets: tuple[Target, ...], out: Path, first: FirstBuild, progress: Progress) -> None:
    """Build all targets into ``out``.

    Raises
    ------
    ToolchainError
        Too little disk, no network, or the compiler refused.
    """
    env = go_environment()
    caches = _go_caches(go, env)
    warm = any(caches["GOMODCACHE"].glob(first.module))
    check_disk({**caches, "TWINPOOL_CACHE": out}, REBUILD_BYTES if warm else first.disk)
    if not warm:
        progress.say(first.message)
    scratch = out / "scratch"
    scratch.mkdir()
    env["GOTMPDIR"] = str(scratch)
    for target in targets:
        _build_one(go, target, out, env, progress)
    shutil.rmtree(scratch)


def _go_caches(go: Path, env: Mapping[str, str]) -> dict[str, Path]:
    out = subprocess.run(
        [go, "env", "-json", "GOMODCACHE", "GOCACHE"], env=env, capture_output=True, text=True, check=True
    ).stdout
    return {name: Path(value) for name, value in json.loads(out).items()}


def _build_one(go: Path, target: Target, out: Path, env: Mapping[str, str], progress: Progress) -> None:
    log = out / "scratch" / f"{target.name}.log"
    command = [str(go), "build", "-v", "-mod=readonly", "-buildvcs=false", "-trimpath"]
    command += ["-tags", target.tags, "-ldflags", target.ldflags, "-o", str(out / target.name), target.package]
    progress.say(f"building {target.name}")
    start = last = time.monotonic()
    tie = die_with_parent() if threading.current_thread() is threading.main_thread() else None
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=target.module, env=env, stdout=output, stderr=output, preexec_fn=tie)
    try:
        while True:
            try:
                code = process.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                pass
            if time.monotonic() - last >= _HEARTBEAT:
                last = time.monotonic()
                progress.say(
                    f"building {target.name}: {last - start:.0f} s, {describe(log.read_text(errors='replace'))}"
                )
    finally:
        process.kill()
        process.wait()
    if code:
        raise explain(target.name, log.read_text(errors="replace"))


def describe(output: str) -> str:
    """Say in a few words how far a build with this output is."""
    lines = output.splitlines()
    packages = sum(1 for line in lines if _PACKAGE.fullmatch(line))
    modules = sum(1 for line in lines if line.startswith("go: downloading"))
    return f"{packages} packages compiled" if packages else f"{modules} modules fetched"


def explain(name: str, output: str) -> ToolchainError:
    """Turn the output of a failed build into an error that says what to do."""
    lines = [line for line in output.splitlines() if line and not _PACKAGE.fullmatch(line)]
    lines = [line for line in lines if not line.startswith("go: downloading")]
    said = " | ".join(lines[-6:]) or "killed without a message"
    if "no space left on device" in output:
        return ToolchainError(
            f"the disk is full while building {name}: {said}",
            "make room (a first build needs 6 GB) or set TWINPOOL_CACHE, GOCACHE and GOMODCACHE to a larger disk",
        )
    if _NO_NETWORK.search(output):
        return ToolchainError(
            f"Go modules for {name} cannot be fetched: {said}",
            "let this machine reach the Go module proxy (see GOPROXY), then start again: what was fetched is kept",
        )
    if "signal: killed" in output or not lines:
        return ToolchainError(
            f"building {name} was killed: {said}", "free memory (the linker needs about 2 GB) and start again"
        )
    return ToolchainError(f"building {name} failed: {said}", "report this with the lines above")
