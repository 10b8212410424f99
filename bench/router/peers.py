"""Other routers and clients (packages on PyPI), each installed once, in an environment of its own in the cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable


@dataclass(frozen=True, slots=True)
class Peer:
    """A program to stand beside, or to ask with."""

    package: str
    version: str
    command: str
    #: What it asks for and does not need for what is asked of it here.
    without: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """Return its name as the notes under the table show it."""
        return f"{self.package} {self.version}"


VLLM = Peer("vllm-router", "0.1.17", "vllm-router")
SMG = Peer("smg", "1.13.0", "smg")
#: NVIDIA's load generator, without its plots, searches and Kubernetes: 0.7 GB instead of 0.9.
AIPERF = Peer(
    "aiperf",
    "0.13.0",
    "aiperf",
    frozenset(
        [
            "dash",
            "dash-bootstrap-components",
            "kaleido",
            "kopf",
            "kubernetes-asyncio",
            "matplotlib",
            "nvidia-ml-py",
            "optuna",
            "plotly",
            "seaborn",
            "sentencepiece",
            "soundfile",
        ]
    ),
)

#: Prints what the installed package named by the first argument asks for, extras left out.
_ASKS = "import importlib.metadata, sys; print(*importlib.metadata.requires(sys.argv[1]) or (), sep='\\n')"


def installed(peer: Peer) -> Path | None:
    """Return its command, or None when it cannot be had here (no network, another platform)."""
    cache = Path(os.environ.get("TWINPOOL_CACHE", Path.home() / ".cache" / "twinpool"))
    folder = cache / "bench" / f"{peer.package}-{peer.version}"
    command = folder / "bin" / peer.command
    if (folder / "complete").exists():
        return command
    print(f"installing {peer} once ...", file=sys.stderr, flush=True)
    try:
        _install(peer, folder)
    except (OSError, subprocess.SubprocessError):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    (folder / "complete").touch()
    return command


def _install(peer: Peer, folder: Path) -> None:
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    if not peer.without:
        _run([*pip, f"{peer.package}=={peer.version}"])
        return
    _run([*pip, "--no-deps", f"{peer.package}=={peer.version}"])
    _run([*pip, *needed(_run([python, "-c", _ASKS, peer.package]).splitlines(), peer.without)])


def needed(asked: Iterable[str], without: Container[str]) -> list[str]:
    """Return the requirements (as in a package's metadata) that belong to no extra and are of none ``without``."""
    return [line for line in asked if "extra ==" not in line and re.split(r"[^\w.-]", line)[0].lower() not in without]


def _run(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, timeout=600, check=True).stdout
