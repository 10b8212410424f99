"""What an engine keeps or runs at once, as far as its arguments say."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from twinpool.core.protocol import MOST_ADAPTERS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.core.spec import InferencePool


def sequences(pool: InferencePool) -> int | None:
    """Return ``--max-num-seqs`` of a decode worker, of each of its data-parallel ranks; None where it is not there."""
    return _number((*pool.spec.engine.args, *pool.spec.decode.engine.args), "--max-num-seqs")


def adapter_slots(pool: InferencePool) -> int:
    """Return how many LoRA adapters a decode worker keeps loaded, 0 where it keeps all of the pool's."""
    arguments = (*pool.spec.engine.args, *pool.spec.decode.engine.args)
    slots = _number(arguments, "--max-loras") or MOST_ADAPTERS
    return slots if slots < len(pool.spec.model.adapters) else 0


def _number(arguments: Iterable[str], flag: str) -> int | None:
    words = [word for argument in arguments for word in argument.split("=")]
    found = [after for word, after in pairwise(words) if word == flag]
    return int(found[-1]) if found and found[-1].isdecimal() else None
