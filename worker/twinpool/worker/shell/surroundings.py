"""What the launcher finds in its pod that says what work costs: accelerator, model, engine. Only looks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.worker.logic.pricing import Surroundings

if TYPE_CHECKING:
    from twinpool.core.protocol import WorkerConfig

#: Where NVIDIA's driver names each GPU, in containers too.
NVIDIA = Path("/proc/driver/nvidia/gpus")
#: The field that vLLM 0.32 has for a schedule, looked for in the source: importing vLLM would import torch.
_SCHEDULE = "num_speculative_tokens_per_batch_size"


def look(config: WorkerConfig, nvidia: Path = NVIDIA) -> Surroundings:
    """Return what is there; nothing is looked at where nothing depends on it."""
    if config.speculation is None and not config.host_kv_bytes and not config.expert_balancing:
        return Surroundings()
    takes_schedule = config.engine == "simulated" or _SCHEDULE in source("vllm", "config/speculative.py")
    return Surroundings(_gpu_name(nvidia), _model(config.model_path), takes_schedule)


def source(package: str, path: str) -> str:
    """Return the text of a file of an installed package, empty when it is not there; nothing is imported."""
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found else ():
        try:
            return (Path(folder) / path).read_text(encoding="utf-8")
        except OSError:
            continue
    return ""


def _gpu_name(folder: Path) -> str:
    for file in sorted(folder.glob("*/information")):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return ""


def _model(path: str) -> dict[str, Any] | None:
    if not path.startswith("/"):
        return None
    try:
        config: Any = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
