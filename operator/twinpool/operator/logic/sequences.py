"""How many sequences a decode engine runs at once, as far as its arguments say."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinpool.core.spec import InferencePool


def sequences(pool: InferencePool) -> int | None:
    """Return ``--max-num-seqs`` of a decode worker, of each of its data-parallel ranks; None where it is not there."""
    words = [
        word for argument in (*pool.spec.engine.args, *pool.spec.decode.engine.args) for word in argument.split("=")
    ]
    found = [after for word, after in pairwise(words) if word == "--max-num-seqs"]
    return int(found[-1]) if found and found[-1].isdecimal() else None
