"""Make the models, each once, into the cache."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.localengine.errors import EngineError
from twinpool.localengine.heartbeat import heartbeat
from twinpool.localengine.install import check_disk, engine_environment, locked
from twinpool.localengine.layout import engine_files, models_dir

if TYPE_CHECKING:
    from pathlib import Path

    from twinpool.localcluster.progress import Progress
    from twinpool.localengine.layout import Engine


@dataclass(frozen=True)
class Model:
    """A model that can be made here."""

    name: str
    script: str
    #: Bytes on disk, with the temporary copy.
    disk: int
    what: str

    @property
    def folder(self) -> Path:
        """Where it is kept. It is moved there whole, so it exists only when it is complete."""
        return models_dir() / self.name

    @property
    def made(self) -> bool:
        """Whether it is there."""
        return self.folder.is_dir()


SMOLLM2 = Model("smollm2-135m-instruct", "smollm2.py", 700_000_000, "SmolLM2-135M-Instruct as float32 (538 MB)")
TINY = Model("tiny", "tiny.py", 50_000_000, "a tiny random Llama for tests (14 MB)")
TINY_MOE = Model("tiny-moe", "tiny_moe.py", 50_000_000, "a tiny random mixture of experts for tests (6 MB)")
MODELS = {model.name: model for model in (SMOLLM2, TINY, TINY_MOE)}


def ensure_model(model: Model, engine: Engine, progress: Progress) -> Path:
    """Return the model's folder, making it on first use with the engine's Python.

    Raises
    ------
    EngineError
        It cannot be made; the message says why.
    """
    if model.made:
        return model.folder
    with locked(models_dir() / ".lock", progress):
        if not model.made:
            _make(model, engine, progress)
    return model.folder


def _make(model: Model, engine: Engine, progress: Progress) -> None:
    check_disk(models_dir(), model.disk)
    progress.say(f"making {model.what}")
    for stale in models_dir().glob(f".{model.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = models_dir() / f".{model.name}.{os.getpid()}"
    command = [str(engine.python), str(engine_files() / "models" / model.script), str(temporary)]
    with heartbeat(progress, f"making {model.name}"):
        done = subprocess.run(command, env=engine_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(temporary, ignore_errors=True)
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        remedy = "give it more memory" if done.returncode == -9 else "run it again; it begins anew"
        raise EngineError(f"the model {model.name} cannot be made: {lines[-1]}", remedy)
    temporary.rename(model.folder)
    progress.say(f"  {model.folder}")
