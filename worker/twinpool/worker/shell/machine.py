"""Looks at a pod's machine and its model's files before the engine starts. Takes :data:`ASK_TIMEOUT` at most."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.worker.logic import machine
from twinpool.worker.logic.machine import Machine
from twinpool.worker.shell.surroundings import source

if TYPE_CHECKING:
    from twinpool.core.protocol import WorkerConfig

#: Seconds for ``nvidia-smi``, which hangs when a GPU does.
ASK_TIMEOUT = 10.0
SHM = Path("/dev/shm")  # noqa: S108 - the container's own shared memory
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def look(config: WorkerConfig, shm: Path = SHM) -> Machine:
    """Return what is there; nothing is looked at for the simulated engine, and no GPU for a pod without one."""
    if config.engine != "vllm":
        return Machine()
    seen, silent = _gpus() if config.gpus else (None, "")
    return Machine(
        _size(shm),
        seen,
        silent,
        machine.cuda_of(source("torch", "version.py")) if config.gpus else "",
        _missing(config),
        config.model_path,
    )


def _size(folder: Path) -> int | None:
    try:
        stats = os.statvfs(folder)
    except OSError:
        return None
    return stats.f_blocks * stats.f_frsize


def _gpus() -> tuple[tuple[machine.Gpu, ...] | None, str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, ""
    query = [program, f"--query-gpu={','.join(machine.FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=ASK_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return None, f"nothing within {ASK_TIMEOUT:g} s"
    except OSError as error:
        return None, str(error.strerror)
    if done.returncode:
        return None, (done.stdout + done.stderr).strip()[:300]
    return machine.gpus(done.stdout), ""


def _missing(config: WorkerConfig) -> tuple[str, ...]:
    """Return which files that the model's index lists are not there, empty, or pointers to what was not fetched."""
    if not config.model_path.startswith("/") or any(word.startswith("--load-format") for word in config.args):
        return ()
    folder = Path(config.model_path)
    for name in _INDEXES:
        try:
            listed = machine.shards((folder / name).read_bytes())
        except OSError:
            continue
        return tuple(each for each in listed if not _whole(folder / each))
    return ()


def _whole(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(len(machine.LFS_POINTER))
    except OSError:
        return False
    return bool(head) and head != machine.LFS_POINTER
