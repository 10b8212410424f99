"""Other routers (packages on PyPI), each installed once into an environment of its own in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Peer:
    """A router to stand beside."""

    package: str
    version: str
    command: str

    def __str__(self) -> str:
        """Return its name as the notes under the table show it."""
        return f"{self.package} {self.version}"


VLLM = Peer("vllm-router", "0.1.17", "vllm-router")
SMG = Peer("smg", "1.13.0", "smg")


def installed(peer: Peer) -> Path | None:
    """Return its command, or None when it cannot be had here (no network, another platform)."""
    cache = Path(os.environ.get("TWINPOOL_CACHE", Path.home() / ".cache" / "twinpool"))
    folder = cache / "bench" / f"{peer.package}-{peer.version}"
    command = folder / "bin" / peer.command
    if (folder / "complete").exists():
        return command
    print(f"installing {peer} once, to measure beside it ...", file=sys.stderr, flush=True)
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"{peer.package}=={peer.version}"],
    )
    for step in steps:
        try:
            subprocess.run(step, capture_output=True, timeout=300, check=True)
        except (OSError, subprocess.SubprocessError):
            shutil.rmtree(folder, ignore_errors=True)
            return None
    (folder / "complete").touch()
    return command
