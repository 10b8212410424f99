"""The part of ``twinpool plan`` about memory and parallelism: does the model fit, and which split would serve most."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from twinpool.core.errors import TwinpoolError
from twinpool.core.sizing import Network, Option, Split, Workload, option, options, shape_of
from twinpool.core.timing import ACCELERATORS
from twinpool.core.units import parse_duration
from twinpool.operator.logic import names
from twinpool.operator.logic.placement.seconds import Served

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from twinpool.core.spec import InferencePool

#: Splits that are shown.
_SHOWN = 5
_DEFAULT = Workload()


@dataclass(frozen=True, slots=True)
class Sizing:
    """How each role's split does, and the best splits for the role."""

    gpu: str
    roles: Mapping[str, Option]
    best: Mapping[str, list[Option]]

    @property
    def fits(self) -> bool:
        """Return whether the model fits in every role."""
        return all(item.fits for item in self.roles.values())

    def lines(self) -> Iterable[str]:
        """Yield what is said to people."""
        yield f"memory of one {self.gpu} and tokens/s for each GPU; estimates from data sheets, nothing is measured:"
        for role, item in self.roles.items():
            verdict = "fits" if item.fits else "does not fit"
            yield f"  {role} {_split(item)}: {_memory(item)}: {verdict}; {_rates(item)}"
            yield from (f"    {text}" for text in item.warnings)
            others = ", ".join(f"{_split(best)} ({_rates(best)})" for best in self.best[role])
            yield f"    best of those that fit: {others or 'none; take a larger GPU, or fewer requests at once'}"

    def to_json(self) -> dict[str, Any]:
        """Return the same for machines; bytes and tokens/s."""
        return {
            "gpu": self.gpu,
            "roles": {
                role: {**asdict(item), "fits": item.fits, "best": [asdict(best) for best in self.best[role]]}
                for role, item in self.roles.items()
            },
        }


def served(pool: InferencePool, config: Path, gpu: str, context: int | None, concurrency: int) -> Served:
    """Return what a pool serves how: the model of a ``config.json``, its splits and what it is asked for.

    Raises
    ------
    TwinpoolError
        When the file cannot be used, or the GPU is unknown.
    """
    if gpu not in ACCELERATORS:
        raise TwinpoolError(f"the GPU {gpu!r} is unknown", f"use {', '.join(ACCELERATORS)}")
    try:
        found = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise TwinpoolError(f"{config} cannot be read: {error}", "give the model's config.json") from None
    objectives = pool.spec.objectives
    work = Workload(
        context or pool.spec.model.max_model_len or _DEFAULT.context,
        concurrency,
        parse_duration(objectives.ttft) if objectives.ttft else _DEFAULT.ttft,
        parse_duration(objectives.itl) if objectives.itl else _DEFAULT.itl,
    )
    splits = {
        name: Split(role.parallelism.tensor, role.parallelism.pipeline) for name, role in names.roles(pool).items()
    }
    return Served(shape_of(found, pool.spec.model.name), ACCELERATORS[gpu], splits, work)


def sizing(pool: InferencePool, what: Served) -> Sizing:
    """Return how the pool's roles do with their model on that GPU."""
    shape, gpu, work = what.shape, what.gpu, what.work
    roles, best = {}, {}
    for name, role in names.roles(pool).items():
        network = Network(role.resources.gpu.per_node or 1, gpu.inside, gpu.across)
        roles[name] = option(shape, gpu, what.splits[name], work, network)
        ranked = options(shape, gpu, work, network)
        if name == "prefill":
            ranked = sorted(ranked, key=lambda item: (-item.prefill, item.split.gpus))
        best[name] = ranked[:_SHOWN]
    return Sizing(gpu.name, roles, best)


def _split(item: Option) -> str:
    return f"tensor {item.split.tensor} x pipeline {item.split.pipeline}"


def _memory(item: Option) -> str:
    parts = (("weights", item.weights), ("KV", item.kv), ("activations", item.activations))
    return " + ".join(f"{name} {size / 1e9:.1f}" for name, size in parts) + f" of {item.room / 1e9:.1f} GB"


def _rates(item: Option) -> str:
    return f"prefill {item.prefill:.0f}, decode {item.decode:.0f}"
