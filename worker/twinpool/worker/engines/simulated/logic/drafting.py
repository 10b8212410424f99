"""Speculative decoding of the simulated engine: how many tokens a step drafts, and how many of them are right. Pure.

Whether a draft is right follows from the tokens before it, so a run repeats; which tokens come out never changes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from twinpool.core.errors import InvalidValue
from twinpool.worker.engines.simulated.logic import language

_KEYS = {"method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"}
#: What tells the drafts of one place from each other; odd and arbitrary.
_STRIDE = 0x5851F42D4C957F2D
_BITS = 1 << 64


@dataclass(frozen=True, slots=True)
class Drafting:
    """How an engine drafts.

    Parameters
    ----------
    tokens:
        Most tokens for each sequence and step.
    schedule:
        (first batch, last batch, tokens), instead of ``tokens``; the last entry goes on.
    acceptance:
        Probability that a drafted token is right when those before it were.
    share:
        What drafting one token takes, as a share of a decode step.
    """

    tokens: int
    schedule: tuple[tuple[int, int, int], ...] = ()
    acceptance: float = 0.6
    share: float = 0.0

    def count(self, batch: int) -> int:
        """Return the tokens to draft for each of ``batch`` sequences."""
        found = self.tokens
        for first, _, tokens in self.schedule:
            if batch >= first:
                found = min(self.tokens, tokens)
        return found

    def right(self, state: int, drafted: int) -> int:
        """Return how many of the drafts after a sequence's ``state`` are right, up to the first wrong one."""
        for position in range(drafted):
            if language.mixed((state + (position + 1) * _STRIDE) % _BITS) >= self.acceptance * _BITS:
                return position
        return drafted


def parse(text: str, acceptance: float, share: float) -> Drafting:
    """Read vLLM's ``--speculative-config``.

    Raises
    ------
    InvalidValue
        When it is not JSON, has keys that are not known, or no number of tokens.
    """
    try:
        config: Any = json.loads(text)
    except ValueError as error:
        raise InvalidValue(f"--speculative-config is not JSON: {error}", "write it as for vLLM") from None
    if not isinstance(config, dict) or not config.keys() <= _KEYS:
        raise InvalidValue("--speculative-config has keys that are not known", f"known are: {', '.join(sorted(_KEYS))}")
    try:
        tokens = int(config["num_speculative_tokens"])
        entries = config.get("num_speculative_tokens_per_batch_size") or ()
        schedule = tuple((int(first), int(last), int(count)) for first, last, count in entries)
    except (KeyError, TypeError, ValueError):
        raise InvalidValue(
            "--speculative-config needs num_speculative_tokens; entries of a schedule are three numbers",
            'for example {"method": "ngram", "num_speculative_tokens": 4}',
        ) from None
    if tokens < 1 or any(first < 1 or last < first or count < 0 for first, last, count in schedule):
        raise InvalidValue("--speculative-config has a number that is too small", "draft at least one token")
    return Drafting(tokens, schedule, acceptance, share)
