"""vLLM's own router (package ``vllm-router``), installed once into an environment of its own in the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSION = "0.1.17"


def installed() -> Path | None:
    """Return its command, or None when it cannot be had here (no network, another platform)."""
    cache = Path(os.environ.get("TWINPOOL_CACHE", Path.home() / ".cache" / "twinpool"))
    folder = cache / "bench" / f"vllm-router-{VERSION}"
    command = folder / "bin" / "vllm-router"
    if (folder / "complete").exists():
        return command
    print(f"installing vllm-router {VERSION} once, to measure beside it (about 40 MB) ...", file=sys.stderr, flush=True)
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"vllm-router=={VERSION}"],
    )
    for step in steps:
        try:
            subprocess.run(step, capture_output=True, timeout=300, check=True)
        except (OSError, subprocess.SubprocessError):
            shutil.rmtree(folder, ignore_errors=True)
            return None
    (folder / "complete").touch()
    return command
