"""The command line of a renderer: the engine's own program, without an engine, that turns texts into token ids.

It gets the arguments of the pool's engine, because chat templates and tokenizers are chosen there, and the worker's
settings, so that both name the same model. Checked against vLLM 0.32 and 0.33 (``vllm launch render``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.core.managed import refuse_managed
from twinpool.worker.engines.command import Command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.core.protocol import WorkerConfig
    from twinpool.worker.engines.command import Pod


def render_command(config: WorkerConfig, pod: Pod, environment: Mapping[str, str], python: str) -> Command:
    """Return how to start a renderer; ``python`` is the interpreter that the simulated one is run by.

    Raises
    ------
    InvalidValue
        When a user argument sets a flag that Twinpool sets; the message names it.
    """
    refuse_managed(config.args)
    if config.engine == "simulated":
        argv = [python, "-m", "twinpool.worker", "simulate", "--enable-scale-out", "--model", config.model]
    else:
        argv = [config.python, "-m", "vllm.entrypoints.cli.main", "launch", "render", config.model_path]
        argv += ["--served-model-name", config.model]
        if config.model_revision is not None:
            argv += ["--revision", config.model_revision]
    argv += ["--host", pod.ip, "--port", str(protocol.ENGINE_PORT)]
    if config.max_model_len is not None:
        argv += ["--max-model-len", str(config.max_model_len)]
    # VLLM_PORT is an address where a Service is called vllm.
    env = {name: value for name, value in environment.items() if name not in (protocol.WORKER_CONFIG_ENV, "VLLM_PORT")}
    return Command(tuple(argv) + config.args, env, on_cpu=True)
