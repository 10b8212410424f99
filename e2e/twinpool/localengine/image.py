"""The engine as an image of the local cluster."""

from __future__ import annotations

from typing import Any

from twinpool.localcluster.images import SYSTEM_PATH
from twinpool.localengine.errors import EngineError
from twinpool.localengine.layout import Engine, engine, engine_files, models_dir

#: The image name that stands for the engine.
IMAGE = "twinpool/vllm-cpu:dev"


def serving_environment(installed: Engine) -> dict[str, str]:
    """Return the environment in which vLLM serves well on a machine with few cores."""
    return {
        "PATH": f"{installed.venv / 'bin'}:{SYSTEM_PATH}",
        "PYTHONPATH": str(engine_files() / "shim"),
        "SHIM_FORK": "1",
        # An empty text is as good as unset: without .pyc files every process imports for minutes.
        "PYTHONDONTWRITEBYTECODE": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # What crosses pods; shared memory would hide network faults.
        "UCX_TLS": "tcp",
    }


def engine_image() -> dict[str, Any]:
    """Return the engine in the shape of the local cluster's image list; its models are below ``/models``.

    Raises
    ------
    EngineError
        The engine is not installed.
    """
    wanted = engine()
    if not wanted.installed:
        raise EngineError("vLLM is not installed on this machine", "run: python -m twinpool.localengine install")
    return {"entrypoint": [], "args": [], "env": serving_environment(wanted), "files": {"/models": str(models_dir())}}
