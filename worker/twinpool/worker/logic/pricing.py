"""What a launcher finds in its pod that says what work costs there: accelerator, model, engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinpool.core.accelerators import ACCELERATORS
from twinpool.core.economics import ASSUMED, prices_of
from twinpool.core.errors import InvalidValue
from twinpool.core.kv import SHAPES, kv_bytes_per_token
from twinpool.core.model_config import shape_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.core.accelerators import Accelerator
    from twinpool.core.economics import Prices
    from twinpool.core.kv import ModelShape
    from twinpool.core.protocol import WorkerConfig


@dataclass(frozen=True)
class Surroundings:
    """What a launcher finds at its start."""

    #: The accelerator as its driver names it; empty when there is none or it has no name.
    accelerator: str = ""
    #: The model's ``config.json``; None when it is not on a disk of this pod yet.
    model: Mapping[str, Any] | None = None
    #: Whether the engine takes a number of tokens for each batch size.
    takes_schedule: bool = False

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape; None when its configuration is not there or not understood."""
        try:
            return None if self.model is None else shape_of(self.model, "config.json")
        except InvalidValue:
            return None


@dataclass(frozen=True)
class Basis:
    """What work costs, the bytes of a token's KV, and what that was taken from, in words."""

    prices: Prices
    kv_bytes: int
    words: str


def basis(config: WorkerConfig, found: Surroundings) -> Basis:
    """Return what steps cost; what is not known is as in ``economics.ASSUMED``."""
    gpu = ACCELERATORS["cpu"] if config.gpus == 0 else accelerator(found.accelerator)
    shape = found.shape
    if gpu is None or shape is None:
        missing = "the accelerator" if gpu is None else "the shape of the model"
        words = f"{missing} is not known, an 8B model on an H100 is assumed"
        return Basis(ASSUMED, kv_bytes_per_token(SHAPES["llama-3-8b"]), words)
    count = config.tensor * config.pipeline
    words = f"{shape.parameters / 1e9:.1f}B weights on {count} x {gpu.name}"
    return Basis(prices_of(shape, gpu, count), kv_bytes_per_token(shape), words)


def accelerator(name: str) -> Accelerator | None:
    """Return the data sheet of an accelerator by its driver's name (``NVIDIA H100 80GB HBM3``); None for others."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((ACCELERATORS[word] for word in words if word in ACCELERATORS), None)
