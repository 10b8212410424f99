"""Choose the Python that the engine is installed for."""

from __future__ import annotations

import shutil
import subprocess
import sys

from twinpool.localengine.errors import EngineError

#: Minor versions of Python 3 for which every pinned package has a wheel, best first: the tested one leads.
SUPPORTED = (11, 12, 13, 14)


def find_python() -> str:
    """Return an interpreter for the engine: the running one if it fits, else the first fitting one on PATH.

    Raises
    ------
    EngineError
        No interpreter fits.
    """
    if sys.version_info.minor in SUPPORTED:
        return sys.executable
    for minor in SUPPORTED:
        path = shutil.which(f"python3.{minor}")
        if path is not None and _runs(path):
            return path
    wanted = ", ".join(f"3.{minor}" for minor in SUPPORTED)
    raise EngineError(
        f"vLLM's wheels need Python {wanted}, but this is 3.{sys.version_info.minor} and none of those is on PATH",
        "install one of them, for example with 'uv python install 3.11', and put it on PATH",
    )


def _runs(path: str) -> bool:
    """Return whether the interpreter starts; a version manager's stand-in for a missing version does not."""
    try:
        return subprocess.run([path, "-c", ""], capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
