"""Speculative decoding of one worker: which ``--speculative-config`` it starts with, and what its engine then kept.

A number that the user gave is passed on. ``auto`` becomes a schedule by batch size where the installed vLLM takes one,
and one fixed number where it does not; every choice says in words what it rests on, because acceptance is assumed
until traffic has shown it. Always true: all ranks of a group choose the same, as they see the same model and hardware.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.core import drafts
from twinpool.worker.logic.load import series
from twinpool.worker.logic.pricing import Surroundings, basis

if TYPE_CHECKING:
    from twinpool.core.protocol import SpeculationMethod, WorkerConfig

_PREFIX = "vllm:spec_decode_num_"
_POSITION = re.compile(r'[{,]position="(\d+)"')


@dataclass(frozen=True)
class Choice:
    """The value of ``--speculative-config``, empty for none, and what was chosen, in words."""

    argument: str
    words: str


def choose(config: WorkerConfig, found: Surroundings) -> Choice | None:
    """Return how the engine shall speculate; None when the pool does not ask for it."""
    method = config.speculation
    if method is None:
        return None
    drafter = drafts.DRAFTERS[method]
    if config.role == "prefill" and not drafter.own_kv:
        return Choice("", f"{method} is left to decode: a prefill worker writes one token for each prompt")
    if config.draft_tokens:
        return _fixed(config, method, config.draft_tokens, f"{config.draft_tokens} tokens, as the pool says")
    if config.role == "prefill":
        return _fixed(config, method, 1, "auto: 1 token, so that the draft's KV is filled for decode")
    known = basis(config, found)
    prices = known.prices
    context = min(drafts.USUAL_CONTEXT, config.max_model_len or drafts.USUAL_CONTEXT)
    ground = f"{known.words}; estimated, with {drafter.acceptance:g} of the drafted tokens kept at each position"
    entries = drafts.schedule(prices, drafter, context)
    if found.takes_schedule and config.data == 1 and len(entries) > 1:
        most = entries[0][2]
        argument = _argument(config, method, most, entries)
        return Choice(argument, f"{method}, auto: {_spoken(entries)} ({ground})")
    tokens = drafts.best(prices, drafter, drafts.USUAL_BATCH, drafter.most, context)
    if config.data > 1:
        why = "vLLM takes no schedule by batch size with data parallelism"
    else:
        why = "one number fits every batch" if found.takes_schedule else "this vLLM takes no schedule by batch size"
    text = f"auto: {tokens} tokens, best for {drafts.USUAL_BATCH} sequences at once, as {why} ({ground})"
    if not tokens and not drafter.own_kv:
        return Choice("", f"{method}, {text}")
    # A drafter with its own KV stays loaded, or prefill and decode would not agree on what they hand over.
    return _fixed(config, method, max(1, tokens), text)


def _fixed(config: WorkerConfig, method: SpeculationMethod, tokens: int, words: str) -> Choice:
    return Choice(_argument(config, method, tokens), f"{method}, {words}")


def _argument(
    config: WorkerConfig, method: SpeculationMethod, tokens: int, entries: tuple[tuple[int, int, int], ...] = ()
) -> str:
    value: dict[str, object] = {"method": method, "num_speculative_tokens": tokens}
    if config.draft_model is not None:
        value["model"] = config.draft_model
    if entries:
        value["num_speculative_tokens_per_batch_size"] = entries
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _spoken(entries: tuple[tuple[int, int, int], ...]) -> str:
    parts = [f"{tokens or 'none'} for {first} to {last} sequences" for first, last, tokens in entries[:-1]]
    return "tokens by batch: " + ", ".join([*parts, f"{entries[-1][2] or 'none'} above"])


@dataclass(frozen=True)
class Kept:
    """What the engine kept of what was drafted, since its start.

    ``drafts`` counts a sequence's drafts, one for each of its steps that had one.
    """

    drafts: float
    drafted: float
    accepted: float
    #: Accepted tokens by position in the draft.
    by_position: tuple[float, ...]

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Return, by position, the share of drafts whose token there was kept: with all before it, not given them."""
        return tuple(count / self.drafts for count in self.by_position) if self.drafts else ()

    @property
    def tokens_per_step(self) -> float:
        """Return the tokens of a step that checked a draft, the one that is always right among them."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


def read(metrics: str) -> Kept | None:
    """Return what an engine's metrics say, over all its ranks; None when it does not speculate."""
    totals = [series(metrics, f"{_PREFIX}{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")]
    if not totals[0]:
        return None
    counts: dict[int, float] = {}
    for labels, value in series(metrics, f"{_PREFIX}accepted_tokens_per_pos_total"):
        match = _POSITION.search(labels)
        position = int(match.group(1)) if match else 0
        counts[position] = counts.get(position, 0.0) + value
    drafts_made, drafted, accepted = (sum(value for _, value in found) for found in totals)
    return Kept(drafts_made, drafted, accepted, tuple(counts[position] for position in sorted(counts)))
