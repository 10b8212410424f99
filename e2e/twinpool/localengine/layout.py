"""Where the local engine and its models are kept.

The engine's folder is named by a digest of everything that decides its contents, so a changed pin is another folder and
never a half-updated one. A folder without its marker was not finished, whatever it holds: virtual environments cannot
be moved, so they are built in place and marked last.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinpool.localcluster.paths import cache_dir

#: Changes when the installation makes something else of the same requirements.
RECIPE = 1


def engine_files() -> Path:
    """Return the repository's folder with the pins, the shim and the model scripts."""
    return Path(__file__).resolve().parents[2] / "engine"


def torch_backend() -> str:
    """Return uv's choice of torch builds: ``UV_TORCH_BACKEND``, or an empty text for PyPI's."""
    return os.environ.get("UV_TORCH_BACKEND", "")


@dataclass(frozen=True)
class Engine:
    """One installed (or planned) engine."""

    folder: Path

    @property
    def venv(self) -> Path:
        """The virtual environment."""
        return self.folder / "venv"

    @property
    def python(self) -> Path:
        """The interpreter that imports vLLM."""
        return self.venv / "bin" / "python"

    @property
    def marker(self) -> Path:
        """The file that says that the installation was finished."""
        return self.folder / "complete.json"

    @property
    def installed(self) -> bool:
        """Whether it is there, whole, with its interpreter."""
        return self.marker.is_file() and self.python.exists()

    def facts(self) -> dict[str, Any]:
        """Return what was written down at the end of the installation."""
        facts: dict[str, Any] = json.loads(self.marker.read_text(encoding="utf-8"))
        return facts


def digest(requirements: bytes, backend: str, recipe: int = RECIPE) -> str:
    """Return the name of the engine's folder: 12 hexadecimal digits."""
    return hashlib.sha256(b"\0".join([requirements, backend.encode(), str(recipe).encode()])).hexdigest()[:12]


def engine() -> Engine:
    """Return the engine that the committed pins describe, installed or not."""
    requirements = (engine_files() / "requirements.txt").read_bytes()
    return Engine(cache_dir() / "engine" / digest(requirements, torch_backend()))


def models_dir() -> Path:
    """Return the folder that holds the models."""
    return cache_dir() / "models"
