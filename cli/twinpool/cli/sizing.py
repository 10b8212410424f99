"""The part of ``twinpool plan`` about memory and parallelism: does the model fit, and which split would serve most."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from twinpool.core.errors import TwinpoolError
from twinpool.core.kv import kv_bytes_per_token
from twinpool.core.model_config import shape_of
from twinpool.core.parallelism import MOST_GPUS, Network, Option, option, options, prefill_per_decode
from twinpool.core.sizing import Split, Workload
from twinpool.core.timing import ACCELERATORS
from twinpool.core.units import parse_duration
from twinpool.operator.logic import names
from twinpool.operator.logic.placement.seconds import Served

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from twinpool.core.kv import ModelShape
    from twinpool.core.spec import InferencePool

#: Splits that are shown.
_SHOWN = 5
_DEFAULT = Workload()


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says of hardware and requests."""

    gpu: str
    tokens: int | None
    answer: int
    concurrency: int
    redundant: int


@dataclass(frozen=True, slots=True)
class Sizing:
    """How each role's split does, and the best splits for the role: those that a pool can say, and all."""

    what: Served
    roles: Mapping[str, Option]
    best: Mapping[str, list[Option]]
    beyond: Mapping[str, list[Option]]

    @property
    def fits(self) -> bool:
        """Return whether the model fits in every role, and an engine takes every split."""
        return all(item.feasible for item in self.roles.values())

    @property
    def ratio(self) -> float | None:
        """Return the prefill replicas for each decode replica, None where a role is missing or serves nothing."""
        if not all(role in self.roles and self._serves(role) for role in ("prefill", "decode")) or not self._answer:
            return None
        rates = self._serves("prefill"), self._serves("decode")
        return prefill_per_decode(self.what.work.prompt, rates[0], self._answer, rates[1])

    @property
    def _answer(self) -> int:
        return self.what.work.answer

    def _serves(self, role: str) -> float:
        """Return the tokens/s of one replica of a role."""
        item = self.roles[role]
        return (item.prefill if role == "prefill" else item.decode) * item.split.gpus

    def lines(self) -> Iterable[str]:
        """Yield what is said to people."""
        yield f"model: {_model(self.what.shape)}"
        yield f"memory of one {self.what.gpu.name}, goodput for each GPU; estimates from data sheets, nothing measured:"
        for role, item in self.roles.items():
            yield f"  {role} {item.split}: {_memory(item)}: {_verdict(item)}; {_rates(item, role)}"
            yield from (f"    the engine refuses it: {text}" for text in item.problems)
            yield from (f"    {text}" for text in item.warnings)
            if item.memory.lacking > 0:
                yield f"    {_remedy(item, self.best[role])}"
            yield from _best("best of those that fit", role, self.best[role])
            if self.beyond[role]:
                yield from _best("with data or expert parallelism", role, self.beyond[role])
        if (ratio := self.ratio) is not None:
            tokens = f"prompts of {self.what.work.prompt} and answers of {self._answer} tokens"
            yield f"  for {tokens} each decode replica needs {ratio:.2g} prefill replicas"

    def to_json(self) -> dict[str, Any]:
        """Return the same for machines; bytes, seconds and tokens/s."""
        shape = self.what.shape
        model = {**asdict(shape), "active": shape.active, "kv_bytes_per_token": kv_bytes_per_token(shape)}
        return {
            "gpu": self.what.gpu.name,
            "model": model,
            "prefill_per_decode": self.ratio,
            "roles": {
                role: {
                    **_json(item),
                    "best": [_json(best) for best in self.best[role]],
                    "beyond": [_json(best) for best in self.beyond[role]],
                }
                for role, item in self.roles.items()
            },
        }


def served(pool: InferencePool, config: Path, asked: Asked) -> Served:
    """Return what a pool serves how: the model of a ``config.json``, its splits and what it is asked for.

    Raises
    ------
    TwinpoolError
        When the file cannot be used, the GPU is unknown, or a request is all answer.
    """
    if asked.gpu not in ACCELERATORS:
        raise TwinpoolError(f"the GPU {asked.gpu!r} is unknown", f"use {', '.join(ACCELERATORS)}")
    try:
        found = json.loads(config.read_text())
    except (OSError, ValueError) as error:
        raise TwinpoolError(f"{config} cannot be read: {error}", "give the model's config.json") from None
    objectives = pool.spec.objectives
    work = Workload(
        asked.tokens or pool.spec.model.max_model_len or _DEFAULT.context,
        asked.concurrency,
        parse_duration(objectives.ttft) if objectives.ttft else _DEFAULT.ttft,
        parse_duration(objectives.itl) if objectives.itl else _DEFAULT.itl,
        asked.answer,
        asked.redundant,
    )
    if work.answer >= work.context:
        raise TwinpoolError(
            f"an answer of {work.answer} tokens leaves no prompt in a request of {work.context}", "give more --tokens"
        )
    splits = {
        name: Split(role.parallelism.tensor, role.parallelism.pipeline, role.parallelism.data, role.parallelism.expert)
        for name, role in names.roles(pool).items()
    }
    return Served(shape_of(found, pool.spec.model.name), ACCELERATORS[asked.gpu], splits, work)


def sizing(pool: InferencePool, what: Served) -> Sizing:
    """Return how the pool's roles do with their model on that GPU."""
    shape, gpu, work = what.shape, what.gpu, what.work
    roles, best, beyond = {}, {}, {}
    for name, role in names.roles(pool).items():
        per_node = max(role.resources.gpu.per_node, gpu.domain, 1)
        network = Network(per_node, gpu.inside, gpu.across)
        roles[name] = option(shape, gpu, what.splits[name], work, network)
        ranked = options(shape, gpu, work, network, name, MOST_GPUS)
        best[name] = [item for item in ranked if _plain(item.split)][:_SHOWN]
        beyond[name] = [item for item in ranked if not _plain(item.split)][:_SHOWN]
    return Sizing(what, roles, best, beyond)


def _plain(split: Split) -> bool:
    """Return whether a split has neither copies nor whole experts on each GPU: these are told apart."""
    return split.data == 1 and not split.expert


def _model(shape: ModelShape) -> str:
    heads = f"{shape.heads} heads, " + (f"a latent of {shape.latent}" if shape.latent else f"{shape.kv_heads} for KV")
    weights = f"{shape.parameters / 1e9:.1f} B weights of {8 * shape.weight_bytes} bits"
    if shape.experts is not None:
        chosen = f"{shape.experts.per_token} of {shape.experts.count} experts in {shape.experts.layers} layers"
        weights += f", {shape.active / 1e9:.1f} B for a token ({chosen})"
    kv = kv_bytes_per_token(shape)
    return f"{shape.layers} layers of {shape.hidden}, {heads}; {weights}; {kv} bytes of KV for a token"


def _verdict(item: Option) -> str:
    return "fits" if item.memory.fits else f"does not fit, {item.memory.lacking / 1e9:.1f} GB are missing"


def _remedy(item: Option, best: list[Option]) -> str:
    """Return what would make it fit: the fewest GPUs that do, and fewer requests."""
    least = min(best, key=lambda each: each.split.gpus, default=None)
    fewer = item.memory.requests * item.split.data
    rest = f"or at most {fewer} requests at once" if fewer else "since even one request has no room"
    return f"take {least.split if least else 'a larger GPU'}, {rest}"


def _best(words: str, role: str, items: list[Option]) -> Iterable[str]:
    if not items:
        yield f"    {words}: none; take a larger GPU, or fewer requests at once"
        return
    yield f"    {words}:"
    yield from (f"      {item.split}: {_rates(item, role)}" for item in items)


def _memory(item: Option) -> str:
    held = item.memory
    copies = f" ({held.redundant / 1e9:.1f} of them copies)" if held.redundant else ""
    parts = (("weights", held.weights, copies), ("KV", held.kv, ""), ("activations", held.activations, ""))
    return " + ".join(f"{name} {size / 1e9:.1f}{more}" for name, size, more in parts) + f" of {held.room / 1e9:.1f} GB"


def _rates(item: Option, role: str) -> str:
    if role == "prefill":
        return f"{item.prefill:.0f} tokens/s, {item.prompt:.3g} s for a prompt alone"
    return f"{item.decode:.0f} tokens/s with {item.requests} requests at once"


def _json(item: Option) -> dict[str, Any]:
    return {**asdict(item), "gpus": item.split.gpus, "fits": item.memory.fits, "feasible": item.feasible}
