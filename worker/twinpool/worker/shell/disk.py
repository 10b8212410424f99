"""Look whether the file systems that an engine writes to have room left."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Bytes below which a file system counts as full: one block of KV in shared memory, or one log line, needs more.
LEAST_ROOM = 4 * 2**20


def places(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the folders that vLLM writes to: temporary files, shared memory between its ranks, caches, the model."""
    home = environment.get("HOME", "/")
    caches = (environment.get(name, "") for name in ("HF_HOME", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME"))
    return tuple(dict.fromkeys([tempfile.gettempdir(), "/dev/shm", home, *filter(None, caches)]))  # noqa: S108


def full(folders: tuple[str, ...]) -> str:
    """Say which of ``folders`` have no room or no inodes left; empty when all have. Read-only ones do not count."""
    found = []
    for folder in folders:
        with contextlib.suppress(OSError):
            stats = os.statvfs(folder)
            if stats.f_flag & os.ST_RDONLY:
                continue
            room = stats.f_bavail * stats.f_frsize
            if stats.f_blocks and room < LEAST_ROOM:
                found.append(f"{folder} has {room / 2**20:.1f} MiB left")
            elif stats.f_files and not stats.f_favail:
                found.append(f"{folder} has no inodes left")
    return ", ".join(found)
