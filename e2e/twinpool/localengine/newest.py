"""Fetch the source of the newest vLLM of the package index, to be read and never imported.

Its wheel holds the sources beside 800 MB of kernels, which are removed at once: it could not run here anyway.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.localcluster.paths import cache_dir
from twinpool.localengine.errors import EngineError
from twinpool.localengine.requirements import explain
from twinpool.localengine.uv import find_uv

if TYPE_CHECKING:
    from twinpool.localcluster.progress import Progress

PACKAGE = "vllm"


def fetch_newest(progress: Progress) -> tuple[str, Path]:
    """Return the newest version and the folder of its package in the cache; what is there is replaced.

    Raises
    ------
    EngineError
        It cannot be fetched.
    """
    target = cache_dir() / "engine" / "newest"
    target.parent.mkdir(parents=True, exist_ok=True)
    uv = find_uv(progress)
    progress.say(f"fetching the newest {PACKAGE} from the package index (for its source; 500 MB)")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="newest-") as folder:
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--no-cache", "--python", sys.executable]
        done = subprocess.run(
            [*command, "--target", folder, PACKAGE],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            problem, remedy = explain(done.stdout + done.stderr)
            raise EngineError(f"the newest {PACKAGE} cannot be fetched: {problem}", remedy)
        keep_source(Path(folder))
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
    return version_in(target), target / PACKAGE


def keep_source(folder: Path) -> None:
    """Remove every file that is neither Python nor metadata."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".py" and ".dist-info" not in path.parent.name:
            path.unlink()


def version_in(folder: Path) -> str:
    """Return the version of the vLLM that was unpacked there.

    Raises
    ------
    EngineError
        There is none.
    """
    found = next(folder.glob(f"{PACKAGE}-*.dist-info"), None)
    if found is None:
        raise EngineError(f"{folder} holds no {PACKAGE}", "run it again")
    return found.name.removeprefix(f"{PACKAGE}-").removesuffix(".dist-info")
