"""Experts of one worker: the flags that balance them, and what the engine's log says of their load.

vLLM 0.32 has no metric of it. With balancing on it logs, every few steps, the load of the mean and of the busiest GPU,
each added up over the layers (``distributed/eplb/eplb_state.py``); loads of single layers and GPUs it keeps to itself.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from twinpool.core.expert_load import Balance, StepLoad, balance

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.core.protocol import WorkerConfig
    from twinpool.worker.logic.pricing import Surroundings

#: What begins the line, and the steps between two of them: telling costs the engine a collective each time.
MARK = b"EPLB step: "
TOLD_EVERY = 100
#: Layers of experts where the model is not on the pod's disk: as many as the largest models have, so that less counts
#: as significant.
_MANY_LAYERS = 64
_LINE = re.compile(r"EPLB step: \d+ for model .*?: avg_tokens=([\d.]+), max_tokens=(\d+)")


def balancing_flags(config: WorkerConfig) -> list[str]:
    """Return the flags that make the engine balance its experts; none when the pool does not ask for it."""
    if not config.expert_balancing:
        return []
    settings = {
        "num_redundant_experts": config.redundant_experts,
        "step_interval": config.expert_interval,
        "window_size": config.expert_window,
        "log_balancedness": True,
        "log_balancedness_interval": TOLD_EVERY,
    }
    return ["--enable-eplb", "--eplb-config", json.dumps(settings, sort_keys=True, separators=(",", ":"))]


def expert_layers(found: Surroundings) -> int:
    """Return the layers of the model that have experts."""
    shape = found.shape
    return shape.experts.layers if shape is not None and shape.experts is not None else _MANY_LAYERS


def read(config: WorkerConfig, lines: Iterable[str], layers: int) -> Balance | None:
    """Return what the engine's log said last of its experts' load; None while it said nothing."""
    found = [StepLoad(float(match[1]), float(match[2])) for line in lines if (match := _LINE.search(line))]
    return balance(found, config.tensor * config.data, layers)
