"""Choose the command for the engine that a worker's settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.core.managed import refuse_managed
from twinpool.worker.engines.command import Command, Place, Pod, simulated_command
from twinpool.worker.engines.vllm.flags import vllm_command

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.core.protocol import WorkerConfig


def engine_command(
    config: WorkerConfig,
    pod: Pod,
    environment: Mapping[str, str],
    gpus_visible: int,
    python: str,
    place: Place | None = None,
    speculative: str = "",
) -> Command:
    """Return how to start the engine; ``python`` is the launcher's own interpreter, ``place`` by default the leader's.

    ``speculative`` is the value of ``--speculative-config``, empty for an engine that does not speculate.

    Raises
    ------
    InvalidValue
        When a user argument sets a flag that Twinpool sets, or contradicts a setting; the message names it.
    """
    refuse_managed(config.args)
    where = place or Place(leader=pod.ip)
    if config.engine == "simulated":
        return simulated_command(config, pod, environment, python, where, speculative)
    return vllm_command(config, pod, environment, gpus_visible, where, speculative)
