"""Request traces: what arrived when, how long it was, and which prompts began alike. Pure; times in seconds.

Two published formats are read: Mooncake's JSON lines (FAST'25; ``timestamp`` in milliseconds, ``hash_ids`` of blocks of
512 tokens) and Azure's CSV of 2023 (Splitwise, ISCA'24). A line that cannot be read is named by number and reason.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from twinpool.core.errors import InvalidValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from random import Random

#: Tokens of one block of a Mooncake trace.
BLOCK_TOKENS = 512
#: Mooncake's time stamps come in steps of three seconds; the moments inside are drawn anew.
_STEP_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request. ``blocks`` names the prompt's full blocks; two prompts with equal leading names began alike."""

    arrival: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def read_mooncake(lines: Iterable[str], name: str) -> tuple[Request, ...]:
    """Read a trace of JSON lines.

    Raises
    ------
    InvalidValue
        With file, line number and reason.
    """
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            request = Request(
                arrival=float(entry["timestamp"]) / 1000,
                prompt=int(entry["input_length"]),
                output=int(entry["output_length"]),
                blocks=tuple(int(block) for block in entry["hash_ids"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(name, number, error, "timestamp, input_length, output_length and hash_ids") from None
        # The last name stands for a block that is not full and so cannot be reused.
        found.append(replace(request, blocks=request.blocks[: request.prompt // BLOCK_TOKENS]))
    return _sorted(found)


def read_azure(lines: Iterable[str], name: str) -> tuple[Request, ...]:
    """Read a trace of CSV with ``TIMESTAMP,ContextTokens,GeneratedTokens``. Its prompts have nothing in common.

    Raises
    ------
    InvalidValue
        With file, line number and reason.
    """
    found = []
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            moment = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            found.append(Request(moment, int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"]))))
        except (ValueError, TypeError, KeyError) as error:
            raise _unreadable(name, number, error, "TIMESTAMP,ContextTokens,GeneratedTokens") from None
    return _sorted(found)


def _unreadable(name: str, number: int, error: Exception, wanted: str) -> InvalidValue:
    return InvalidValue(f"{name}, line {number}: {type(error).__name__}: {error}", f"each line needs {wanted}")


def _sorted(found: Sequence[Request]) -> tuple[Request, ...]:
    """Return the requests by arrival, the first at 0."""
    if not found:
        return ()
    begin = min(request.arrival for request in found)
    return tuple(sorted((replace(r, arrival=r.arrival - begin) for r in found), key=lambda request: request.arrival))


def sample(trace: Sequence[Request], share: float, speed: float, rng: Random) -> tuple[Request, ...]:
    """Return one sample of ``trace``: each request is kept with probability ``share``, at ``speed`` times the rate.

    Arrivals are moved within Mooncake's step of time, so that no two samples are the same; time is squeezed so that a
    smaller share does not lower the rate.
    """
    squeeze = share / speed
    kept = [
        replace(request, arrival=(request.arrival + rng.random() * _STEP_SECONDS) * squeeze)
        for request in trace
        if share >= 1 or rng.random() < share
    ]
    kept.sort(key=lambda request: request.arrival)
    return tuple(kept)
