"""Find uv, or install it once: pip would need several times as long for 160 packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.localcluster.paths import cache_dir
from twinpool.localengine.errors import EngineError
from twinpool.localengine.requirements import explain

if TYPE_CHECKING:
    from twinpool.localcluster.progress import Progress

VERSION = "0.13.9"


def find_uv(progress: Progress) -> str:
    """Return a uv: beside the running Python, on PATH, or in the cache, where it is installed on first use.

    Raises
    ------
    EngineError
        There is none and it cannot be installed.
    """
    boot = cache_dir() / "boot"
    for path in (Path(sys.executable).parent / "uv", boot / "bin" / "uv"):
        if path.exists():
            return str(path)
    on_path = shutil.which("uv")
    if on_path is not None:
        return on_path
    progress.say(f"installing uv {VERSION}")
    if not (boot / "bin" / "python").exists():
        _run(
            [sys.executable, "-m", "venv", str(boot)],
            "install python3-venv (Debian, Ubuntu) or uv itself: https://docs.astral.sh/uv/",
        )
    _run([str(boot / "bin" / "python"), "-m", "pip", "install", "--quiet", f"uv=={VERSION}"], "")
    return str(boot / "bin" / "uv")


def _run(command: list[str], remedy: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise EngineError(f"uv cannot be installed: {command[0]}: {error.strerror}", remedy) from None
    if done.returncode:
        problem, advice = explain(done.stdout + done.stderr)
        raise EngineError(f"uv cannot be installed: {problem}", remedy or advice)
